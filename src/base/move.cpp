#include "zinf/move.h"

#include <utility>

namespace zinf {
namespace {

class Finished final : public Move {
 public:
  explicit Finished(Status outcome) : outcome_(std::move(outcome)) {}
  bool done() override { return true; }
  Status wait() override { return outcome_; }

 private:
  const Status outcome_;
};

}  // namespace

std::unique_ptr<Move> finished_move(Status outcome) {
  return std::make_unique<Finished>(std::move(outcome));
}

}  // namespace zinf
