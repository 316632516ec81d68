// tutorec_loader MODEL REQUEST [LIBRARY ...]: what a scripted model answers to one request, without Python.
//
// Each LIBRARY holds operators that the model calls, and is loaded first. REQUEST is a text file of tensors: two lines
// for each, its name, dtype and sizes, then its numbers. The answer is printed in the same form.
//
//   lengths int64 4
//   2 1 0 2
#include <dlfcn.h>
#include <torch/script.h>
#include <cerrno>
#include <fstream>
#include <iomanip>
#include <iostream>

using Error = std::runtime_error;
std::string doing = "usage: tutorec_loader MODEL REQUEST [LIBRARY ...]";  // for the message, if it fails

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

std::map<std::string, at::Tensor> read_request(std::ifstream file) {
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

void print(const std::string& name, const at::Tensor& tensor) {
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

int main(int argc, char** argv) try {
  if (argc < 3) throw Error("two files are needed");
  doing = "loading an operator library";
  for (int i = 3; i < argc; ++i)
    if (!dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL)) throw Error(dlerror());
  doing = "loading the model " + std::string(argv[1]);
  torch::jit::Module model = torch::jit::load(argv[1]);
  doing = "reading the request " + std::string(argv[2]);
  auto request = read_request(std::ifstream(argv[2]));
  doing = "calling the model";
  std::vector<c10::IValue> inputs;
  for (const auto& argument : model.get_method("forward").function().getSchema().arguments()) {
    if (argument.name() == "self") continue;
    if (!request.count(argument.name())) throw Error("it needs a tensor " + argument.name());
    inputs.push_back(request.extract(argument.name()).mapped());
  }
  if (!request.empty()) throw Error("it takes no tensor " + request.begin()->first);
  c10::InferenceMode guard;
  const c10::IValue answer = model.forward(inputs);
  if (answer.isTensor()) return print("answer", answer.toTensor()), 0;
  for (size_t i = 0; i < answer.toTupleRef().size(); ++i)
    print("answer_" + std::to_string(i), answer.toTupleRef().elements()[i].toTensor());
} catch (const std::exception& error) {
  std::string text = error.what();  // of TorchScript: the lines of code that led there, then what Python would say
  text = text.substr(0, text.find("\nException raised from"));
  const size_t line = text.rfind('\n', text.rfind("Error: "));
  std::cerr << doing << ": " << (line == std::string::npos ? text : text.substr(line + 1)) << std::endl;
  return 1;
}
