// tutorec_loader MODEL REQUEST [LIBRARY ...]: what a scripted model answers to one request, without Python.
//
// Each LIBRARY holds operators that the model calls, and is loaded first. REQUEST is a text file of tensors, and the
// answer is printed in the same form: see tensor_text.h.
#include <dlfcn.h>
#include "file_digest.h"
#include "tensor_text.h"

int main(int argc, char** argv) try {
  doing = "usage: tutorec_loader MODEL REQUEST [LIBRARY ...]";
  if (argc < 3) throw Error("two files are needed");
  doing = "loading an operator library";
  for (int i = 3; i < argc; ++i)
    if (!dlopen(argv[i], RTLD_NOW | RTLD_GLOBAL)) throw Error(dlerror());
  doing = "loading the model " + std::string(argv[1]);
  check_digest(argv[1]);
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
  std::string text = error.what();
  text = text.substr(0, text.find("\nException raised from"));
  if (const size_t raised = text.rfind("Error: "); raised != std::string::npos) {
    text = text.substr(text.rfind('\n', raised) + 1);  // of TorchScript: after lines of code, what Python would say
  } else {
    std::istringstream lines(text);  // of a file that cannot be read: a first line that says it, then lines of code
    while (std::getline(lines, text) && text.empty()) continue;
  }
  std::cerr << doing << ": " << text << std::endl;
  return 1;
}
