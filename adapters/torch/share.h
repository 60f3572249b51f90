// What all ranks have alike before they train: rank 0's model and random
// numbers. Every rank calls these, in the same order.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace zinf {

class Ranks;

// Rank 0's, of any length.
std::string broadcast_text(Ranks& ranks, std::string text);

// They get the values of rank 0's, as after DistributedDataParallel(model);
// what is split already is left as it is. A rank whose names, shapes or types
// are not rank 0's throws, and the others when they next need it.
void share_tensors(
    Ranks& ranks, const std::vector<std::pair<std::string, at::Tensor>>& named);

// Between begin and end every rank draws what rank 0 draws from the CPU's
// default generator. Afterwards it goes on from there where it had the state of
// rank 0's; otherwise it has its own state back.
class SameRandom {
 public:
  explicit SameRandom(Ranks& ranks);
  ~SameRandom();
  SameRandom(const SameRandom&) = delete;
  SameRandom& operator=(const SameRandom&) = delete;

 private:
  at::Generator generator_;
  at::Tensor own_;    // states
  at::Tensor first_;  // rank 0's
};

}  // namespace zinf
