// Tensors that are born while a model is built become units at birth.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <vector>

namespace zinf {

class Manager;

// On this thread, from begin() to end(): every operator reaches the outer key,
// and floating-point CPU tensors that it makes become units of the manager.
class InitMode {
 public:
  // `born` hears of each of them.
  using Born = std::function<void(const at::Tensor&)>;
  static void begin(std::shared_ptr<Manager> manager, Born born = {});
  // What has not become a parameter is an ordinary tensor again.
  static void end();
  static bool active();
  // The tensors that became units at birth, as far as they live.
  static std::vector<at::Tensor> born();

  // While the outermost operator runs, the mode is off: what it makes on its
  // way is its own affair.
  class Inside {
   public:
    Inside();
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    void adopt_results(const c10::OperatorHandle& op,
                       const torch::jit::Stack& stack);

   private:
    std::shared_ptr<Manager> manager_;
  };
};

}  // namespace zinf
