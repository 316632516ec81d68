// Tensors as text, as tutorec/inference/serving.py writes and reads them: for each a line with its name, dtype and sizes,
// then a line with its numbers.
//
//   lengths int64 4
//   2 1 0 2
#pragma once
#include <torch/script.h>
#include <cerrno>
#include <fstream>
#include <iomanip>
#include <iostream>

using Error = std::runtime_error;
inline std::string doing;  // for the message, if it fails

template <typename T>
at::Tensor parse(std::istringstream words, const std::vector<int64_t>& sizes) {
  std::vector<T> numbers;
  for (std::string word; words >> word;) {
    char* end = nullptr;
    errno = 0;
    if constexpr (std::is_integral_v<T>) {
      const long long number = std::strtoll(word.c_str(), &end, 10);
      numbers.push_back(static_cast<T>(number));
      if (errno || numbers.back() != number) throw Error(word + " does not fit");
    } else {
      numbers.push_back(static_cast<T>(std::strtod(word.c_str(), &end)));
    }
    if (*end) throw Error(word + " is no such number");
  }
  if (c10::multiply_integers(sizes) != int64_t(numbers.size()))
    throw Error("there are " + std::to_string(numbers.size()) + " numbers");
  return at::tensor(numbers).reshape(sizes);
}

const std::map<std::string, decltype(&parse<float>)> DTYPES = {
    {"int64", parse<int64_t>}, {"int32", parse<int32_t>}, {"float32", parse<float>}, {"float64", parse<double>}};

inline std::map<std::string, at::Tensor> read_request(std::ifstream file) {
  if (!file) throw Error("there is no such file");
  std::map<std::string, at::Tensor> request;
  for (std::string line, numbers, name, dtype; std::getline(file, line);) {
    std::istringstream header(line);
    if (!(header >> name)) continue;  // an empty line
    doing = "reading the tensor '" + line.substr(0, 80) + "'";
    std::vector<int64_t> sizes;
    header >> dtype;
    for (int64_t size; header >> size;) sizes.push_back(size);
    if (!DTYPES.count(dtype) || !header.eof()) throw Error("that is no name, dtype and sizes");
    std::getline(file, numbers);
    const at::Tensor tensor = DTYPES.at(dtype)(std::istringstream(numbers), sizes);
    if (!request.emplace(name, tensor).second) throw Error("it is there twice");
  }
  return request;
}

inline void print(const std::string& name, const at::Tensor& tensor) {
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
