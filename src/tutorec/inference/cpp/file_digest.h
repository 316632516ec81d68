// The digest of a model's file, as tutorec/inference/file_digest.py writes it: the comment at the end of the zip archive is
// "tutorec sha256 " and the SHA-256 of all bytes before it. A zip archive without a comment, as torch writes it, has none.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

// SHA-256 as FIPS 180-4 defines it, over blocks of 64 bytes.
class Sha256 {
 public:
  Sha256() {
    // The first 32 bits of the fractions of the roots of the first primes.
    for (int candidate = 2, found = 0; found < 64; ++candidate) {
      bool prime = true;
      for (int divisor = 2; divisor * divisor <= candidate; ++divisor) prime &= candidate % divisor != 0;
      if (!prime) continue;
      if (found < 8) state[found] = fraction(sqrtl(candidate));
      constants[found++] = fraction(cbrtl(candidate));
    }
  }

  void block(const unsigned char* bytes) {
    std::array<uint32_t, 64> words;
    for (int i = 0; i < 16; ++i)
      words[i] = uint32_t(bytes[4 * i]) << 24 | uint32_t(bytes[4 * i + 1]) << 16 | uint32_t(bytes[4 * i + 2]) << 8 | bytes[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = words[i - 15], b = words[i - 2];
      words[i] = words[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + words[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t first = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + constants[i] + words[i];
      const uint32_t second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<uint32_t, 8> step = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += step[i];
  }

  std::string digits() const {
    std::string text;
    for (uint32_t word : state)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
  }

 private:
  static uint32_t turn(uint32_t word, int by) { return word >> by | word << (32 - by); }
  static uint32_t fraction(long double root) { return uint32_t((root - floorl(root)) * 4294967296.0L); }
  std::array<uint32_t, 8> state;
  std::array<uint32_t, 64> constants;
};

// The SHA-256 of the first `size` bytes of a file.
inline std::string sha256(std::istream& file, uint64_t size) {
  Sha256 digest;
  std::array<unsigned char, 64> bytes;
  for (uint64_t left = size;; left -= 64) {
    const size_t count = left < 64 ? left : 64;
    file.read(reinterpret_cast<char*>(bytes.data()), count);
    if (size_t(file.gcount()) != count) throw std::runtime_error("it cannot be read to its end");
    if (count == 64) {
      digest.block(bytes.data());
      continue;
    }
    // The last block ends with a bit, zeros, and the number of bits; where those do not fit, in a block of their own.
    std::fill(bytes.begin() + count, bytes.end(), 0);
    bytes[count] = 0x80;
    if (count >= 56) {
      digest.block(bytes.data());
      bytes.fill(0);
    }
    for (int i = 0; i < 8; ++i) bytes[56 + i] = size * 8 >> (56 - 8 * i);
    digest.block(bytes.data());
    return digest.digits();
  }
}

inline void check_digest(const std::string& path) {
  const std::string label = "tutorec sha256 ";
  const uint64_t comment = label.size() + 64, end = 22;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return;  // who opens the model says it
  const uint64_t size = file.tellg(), tail = size < end + comment ? size : end + comment;
  std::string last(tail, 0);
  file.seekg(size - tail);
  file.read(last.data(), tail);
  if (tail >= end && last.compare(tail - end, 4, "PK\5\6") == 0 && last[tail - 1] == 0 && last[tail - 2] == 0) return;
  file.seekg(0);
  if (tail < end + comment || last.substr(end) != label + sha256(file, size - comment))
    throw std::runtime_error("the file is damaged, cut or not a model: it does not end in the SHA-256 of the rest");
}
