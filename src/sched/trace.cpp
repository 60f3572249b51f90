#include "zinf/trace.h"

#include <algorithm>

#include "src/base/check.h"

namespace zinf {

void Trace::add(std::span<const StateUse> at_once) {
  const auto begin = static_cast<std::ptrdiff_t>(uses_.size());
  for (const StateUse& use : at_once) {
    ZINF_CHECK(use.kind != UseKind::kFree || at_once.size() == 1,
               "state %u is freed in the middle of a use", use.state);
    const auto same =
        std::find_if(uses_.begin() + begin, uses_.end(),
                     [&](const StateUse& u) { return u.state == use.state; });
    if (same == uses_.end()) {
      uses_.push_back(use);
    } else if (same->kind != use.kind) {
      same->kind = UseKind::kChange;
    }
  }
  ends_.push_back(static_cast<std::uint32_t>(uses_.size()));
}

void Trace::clear() {
  uses_.clear();
  ends_.clear();
}

}  // namespace zinf
