#include <algorithm>
#include <utility>

#include "src/base/check.h"
#include "zinf/comm.h"

namespace zinf {
namespace {

int place_of(int rank, const std::vector<int>& ranks) {
  const auto found = std::ranges::find(ranks, rank);
  ZINF_CHECK(found != ranks.end(), "rank %d is not in the view", rank);
  return static_cast<int>(found - ranks.begin());
}

class CommView final : public Comm {
 public:
  CommView(std::shared_ptr<Comm> comm, std::vector<int> ranks)
      : Comm(place_of(comm->rank(), ranks), static_cast<int>(ranks.size())),
        comm_(std::move(comm)),
        ranks_(std::move(ranks)) {}

  std::string_view backend() const override { return comm_->backend(); }
  int number(int rank) const override { return comm_->number(of(rank)); }
  int total() const override { return comm_->total(); }
  void close(const Status& why) override { comm_->close(why); }

 private:
  int of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  std::unique_ptr<Move> start_send(int to, Lane lane,
                                   std::span<const std::byte> from) override {
    return comm_->send(of(to), lane, from);
  }
  std::unique_ptr<Move> start_receive(int from, Lane lane,
                                      std::span<std::byte> into) override {
    return comm_->receive(of(from), lane, into);
  }

  const std::shared_ptr<Comm> comm_;
  const std::vector<int> ranks_;
};

}  // namespace

std::unique_ptr<Comm> make_view(std::shared_ptr<Comm> comm,
                                std::vector<int> ranks) {
  return std::make_unique<CommView>(std::move(comm), std::move(ranks));
}

}  // namespace zinf
