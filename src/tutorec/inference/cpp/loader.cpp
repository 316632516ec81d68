// tutorec_loader MODEL REQUEST [LIBRARY ...]: what a scripted model answers to one request, without Python.
//
// Each LIBRARY holds operators that the model calls, and is loaded first. REQUEST is a text file of tensors: two lines
// for each, its name, dtype and sizes, then its numbers. The answer is printed in the same form.
//
//   lengths int64 4
//   2 1 0 2
#include <dlfcn.h>
#include <torch/script.h>

#include <fstream>
#include <iomanip>
#include <iostream>

using Error = std::runtime_error;

template <typename T>
at::Tensor parse(std::istringstream words, const std::vector<int64_t>& sizes) {
  std::vector<T> numbers;
  for (std::string word; words >> word;) {
    char* end = nullptr;
    errno = 0;
    const auto number = [&] {
      if constexpr (std::is_integral_v<T>) return std::strtoll(word.c_str(), &end, 10);
      else return std::strtod(word.c_str(), &end);
    }();
    if (*end || (std::is_integral_v<T> && (errno || number != static_cast<T>(number)))) throw Error("no number of this dtype: " + word);
    numbers.push_back(static_cast<T>(number));
  }
  return at::tensor(numbers).reshape(sizes);
}

const std::map<std::string, decltype(&parse<float>)> DTYPES = {
    {"int64", parse<int64_t>}, {"int32", parse<int32_t>}, {"float32", parse<float>}, {"float64", parse<double>}};

std::map<std::string, at::Tensor> read_request(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error("there is no such file");
  std::map<std::string, at::Tensor> request;
  for (std::string line, numbers, name, dtype; std::getline(file, line);) {
    std::istringstream header(line);
    if (!(header >> name)) continue;  // an empty line
    std::vector<int64_t> sizes;
    header >> dtype;
    for (int64_t size; header >> size;) sizes.push_back(size);
    if (!DTYPES.count(dtype) || !header.eof()) throw Error("not the name, dtype and sizes of a tensor: " + line);
    std::getline(file, numbers);
    if (!request.emplace(name, DTYPES.at(dtype)(std::istringstream(numbers), sizes)).second) throw Error("two tensors " + name);
  }
  return request;
}

void print(const std::string& name, const at::Tensor& tensor) {
  const bool wide = tensor.scalar_type() == at::kDouble;
  std::cout << name << (wide ? " float64" : " float32");
  for (int64_t size : tensor.sizes()) std::cout << ' ' << size;
  std::cout << '\n' << std::setprecision(wide ? 17 : 9);  // as many digits as tell any two numbers apart
  const at::Tensor numbers = tensor.to(at::kDouble).contiguous();
  for (int64_t i = 0; i < numbers.numel(); ++i) std::cout << (i ? " " : "") << numbers.data_ptr<double>()[i];
  std::cout << std::endl;
}

int main(int argc, char** argv) {
  std::string doing = "usage: tutorec_loader MODEL REQUEST [LIBRARY ...]";
  try {
    if (argc < 3) throw Error("two files are needed");
    doing = "loading an operator library";
    for (int i = 3; i < argc; ++i)
      if (!dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL)) throw Error(dlerror());
    doing = std::string("loading the model ") + argv[1];
    torch::jit::Module model = torch::jit::load(argv[1]);
    doing = std::string("reading the request ") + argv[2];
    auto request = read_request(argv[2]);
    std::vector<c10::IValue> inputs;
    for (const auto& argument : model.get_method("forward").function().getSchema().arguments()) {
      if (argument.name() == "self") continue;
      if (!request.count(argument.name())) throw Error("the model needs a tensor " + argument.name());
      inputs.push_back(request.extract(argument.name()).mapped());
    }
    if (!request.empty()) throw Error("the model takes no tensor " + request.begin()->first);
    doing = "running the model";
    c10::InferenceMode guard;
    const c10::IValue answer = model.forward(inputs);
    if (answer.isTensor()) print("answer", answer.toTensor());
    else for (const auto& part : answer.toTupleRef().elements()) print("answer", part.toTensor());
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << doing << ": " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << doing << ": " << error.what() << std::endl;
  }
  return 1;
}
