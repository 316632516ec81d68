// Tensors as text, as tutorec/inference/serving.py writes and reads them: for each a line with its name, dtype and sizes,
// then a line with its numbers.
//
//   lengths int64 4
//   2 1 0 2
#pragma once
#include <torch/script.h>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <limits>

using Error = std::runtime_error;
inline std::string doing;  // for the message, if it fails

inline void check_read_whole(const std::string& word, const char* end) {
  // A byte of zero ends a word for strtoll and for the message, not for the word.
  if (word.find('\0') != std::string::npos) throw Error(std::string(word.c_str()) + " is followed by a byte of zero");
  if (end != word.data() + word.size()) throw Error(word + " is no such number");
}

inline int64_t integer(const std::string& word) {
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(word.c_str(), &end, 10);
  check_read_whole(word, end);
  if (errno) throw Error(word + " does not fit");
  return number;
}

template <typename T>
T real(const std::string& word) {
  char* end = nullptr;
  errno = 0;
  const double number = std::strtod(word.c_str(), &end);
  // Hexadecimal digits and payloads of NaN, which Python does not read.
  if (word.find_first_of("xX(") != std::string::npos) end = nullptr;
  check_read_whole(word, end);
  const T kept = static_cast<T>(number);
  // The word "inf" is infinite as a double, without an error.
  if (std::isinf(kept) && (errno || std::isfinite(number))) throw Error(word + " does not fit");
  return kept;
}

inline size_t count_of(const std::vector<int64_t>& sizes) {
  int64_t strides = 1, count = 1;  // strides count an empty dimension as 1
  for (const int64_t size : sizes) {
    if (size < 0) throw Error("the size " + std::to_string(size) + " is negative");
    if (size > std::numeric_limits<int64_t>::max() / strides) throw Error("its sizes do not fit");
    strides *= std::max<int64_t>(size, 1);
    count *= size;
  }
  return count;
}

template <typename T>
at::Tensor parse(std::istringstream words, const std::vector<int64_t>& sizes) {
  std::vector<T> numbers;
  for (std::string word; words >> word;) {
    if constexpr (std::is_integral_v<T>) {
      const int64_t number = integer(word);
      numbers.push_back(static_cast<T>(number));
      if (numbers.back() != number) throw Error(word + " does not fit");
    } else {
      numbers.push_back(real<T>(word));
    }
  }
  if (count_of(sizes) != numbers.size()) throw Error("there are " + std::to_string(numbers.size()) + " numbers");
  return at::tensor(numbers).reshape(sizes);
}

const std::map<std::string, decltype(&parse<float>)> DTYPES = {
    {"int64", parse<int64_t>}, {"int32", parse<int32_t>}, {"float32", parse<float>}, {"float64", parse<double>}};

inline std::map<std::string, at::Tensor> read_request(std::ifstream file) {
  if (!file) throw Error("there is no such file");
  std::map<std::string, at::Tensor> request;
  for (std::string line; std::getline(file, line);) {
    std::istringstream header(line);
    std::string name, dtype, numbers;
    if (!(header >> name)) continue;  // an empty line
    doing = "reading the tensor '" + line.substr(0, 80) + "'";
    std::vector<int64_t> sizes;
    header >> dtype;
    if (!DTYPES.count(dtype)) throw Error("that is no name, dtype and sizes");
    for (std::string size; header >> size;) sizes.push_back(integer(size));
    std::getline(file, numbers);
    const at::Tensor tensor = DTYPES.at(dtype)(std::istringstream(numbers), sizes);
    if (!request.emplace(name, tensor).second) throw Error("it is there twice");
  }
  return request;
}

inline void print(const std::string& name, const at::Tensor& tensor) {
  // Of these, text of int64 or float64 would give other numbers.
  if (at::isComplexType(tensor.scalar_type()) || tensor.scalar_type() == at::kUInt64)
    throw Error("the " + name + " is " + c10::toString(tensor.scalar_type()) + ", and an answer holds int64, float32 or float64");
  const bool integers = at::isIntegralType(tensor.scalar_type(), true), wide = tensor.scalar_type() == at::kDouble;
  std::cout << name << (integers ? " int64" : wide ? " float64" : " float32");
  for (int64_t size : tensor.sizes()) std::cout << ' ' << size;
  std::cout << '\n' << std::setprecision(wide ? 17 : 9);  // as many digits as tell any two numbers apart
  const at::Tensor numbers = tensor.to(integers ? at::kLong : at::kDouble).flatten();
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    if (integers) std::cout << numbers[i].item<int64_t>() << ' ';
    else std::cout << numbers[i].item<double>() << ' ';
  }
  std::cout << std::endl;
}
