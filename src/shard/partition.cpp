#include "zinf/partition.h"

#include <algorithm>

#include "src/base/align.h"
#include "src/base/check.h"

namespace zinf {

Partition::Partition(std::uint64_t elements, int ranks)
    : elements_(elements), ranks_(ranks) {
  ZINF_CHECK(ranks > 0, "%d ranks", ranks);
  const auto count = static_cast<std::uint64_t>(ranks);
  const std::uint64_t least = elements / count + (elements % count != 0);
  slice_elements_ = align_up(least, kMultiple);
}

Slice Partition::slice(int rank) const {
  ZINF_CHECK(rank >= 0 && rank < ranks_, "rank %d of %d", rank, ranks_);
  const std::uint64_t begin =
      std::min(elements_, static_cast<std::uint64_t>(rank) * slice_elements_);
  return {begin, std::min(elements_, begin + slice_elements_)};
}

int Partition::rank_of(std::uint64_t element) const {
  ZINF_CHECK(element < elements_, "an element beyond the end");
  return static_cast<int>(element / slice_elements_);
}

}  // namespace zinf
