#include "adapters/torch/share.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>

#include "adapters/torch/engine.h"
#include "adapters/torch/error.h"
#include "adapters/torch/manager.h"
#include "adapters/torch/pins.h"
#include "adapters/torch/ranks.h"

namespace zinf {
namespace {

using Lines = std::vector<std::string>;

Lines describe(const std::vector<std::pair<std::string, at::Tensor>>& named) {
  Lines lines;
  for (const auto& [name, tensor] : named) {
    std::ostringstream line;
    line << name << " with shape " << tensor.sizes() << " and "
         << c10::toString(tensor.scalar_type());
    lines.push_back(line.str());
  }
  return lines;
}

Lines split_lines(const std::string& text) {
  Lines lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

void check_same(Ranks& ranks, const Lines& ours) {
  std::string text;
  for (const std::string& line : ours) text += line + "\n";
  const Lines first = split_lines(broadcast_text(ranks, text));
  if (ours == first) return;
  const auto place = static_cast<std::size_t>(
      std::ranges::mismatch(ours, first).in1 - ours.begin());
  auto at = [place](const Lines& lines) {
    return place < lines.size() ? lines[place] : "no more parameters";
  };
  std::string why = "rank " + std::to_string(ranks.rank()) + " has " +
                    at(ours) + " where rank 0 has " + at(first) +
                    ": all ranks must build the same model";
  ranks.fail(Status::error(Code::kInvalid, why));
  refuse(why);
}

void broadcast_tensor(Ranks& ranks, const at::Tensor& tensor) {
  at::Tensor whole = tensor.detach();
  at::Tensor dense = whole.is_non_overlapping_and_dense() && whole.is_cpu()
                         ? whole
                         : whole.cpu().contiguous();
  Pins pins;
  pins.take(dense, Use::kChange);
  ranks.broadcast({static_cast<std::byte*>(dense.data_ptr()), dense.nbytes()});
  if (!dense.is_same(whole)) whole.copy_(dense);
}

}  // namespace

std::string broadcast_text(Ranks& ranks, std::string text) {
  std::uint64_t size = text.size();
  ranks.broadcast(std::as_writable_bytes(std::span(&size, 1)));
  text.resize(size);
  ranks.broadcast(std::as_writable_bytes(std::span(text)));
  return text;
}

void share_tensors(
    Ranks& ranks,
    const std::vector<std::pair<std::string, at::Tensor>>& named) {
  check_same(ranks, describe(named));
  for (const auto& [name, tensor] : named) {
    const bool is_empty = tensor.is_meta() || tensor.numel() == 0;
    if (!is_empty && !is_split_over_ranks(tensor)) {
      broadcast_tensor(ranks, tensor);
    }
  }
}

SameRandom::SameRandom(Ranks& ranks)
    : generator_(at::detail::getDefaultCPUGenerator()),
      own_(generator_.get_state()),
      first_(own_.clone()) {
  broadcast_tensor(ranks, first_);
  generator_.set_state(first_);
}

SameRandom::~SameRandom() {
  if (!at::equal(own_, first_)) generator_.set_state(own_);
}

}  // namespace zinf
