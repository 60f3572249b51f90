#include "zinf/collectives.h"

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "src/base/check.h"
#include "src/base/mutex.h"

namespace zinf {
namespace {

// Messages that are one transfer, and what is to be done when all are there.
class Together final : public Move {
 public:
  using Finish = std::function<Status()>;

  Together(std::vector<std::unique_ptr<Move>> moves, Finish finish)
      : moves_(std::move(moves)), finish_(std::move(finish)) {}
  ~Together() override { (void)wait(); }

  bool done() override {
    MutexLock lock(mutex_);
    if (over_) return true;
    for (const auto& move : moves_) {
      if (!move->done()) return false;
    }
    end_locked();
    return true;
  }
  Status wait() override {
    MutexLock lock(mutex_);
    if (!over_) end_locked();
    return outcome_;
  }

 private:
  void end_locked() ZINF_REQUIRES(mutex_) {
    for (const auto& move : moves_) {
      Status status = move->wait();
      if (outcome_.ok()) outcome_ = status;
    }
    moves_.clear();
    if (outcome_.ok() && finish_) outcome_ = finish_();
    finish_ = nullptr;
    over_ = true;
  }

  Mutex mutex_;
  std::vector<std::unique_ptr<Move>> moves_ ZINF_GUARDED_BY(mutex_);
  Finish finish_ ZINF_GUARDED_BY(mutex_);
  bool over_ ZINF_GUARDED_BY(mutex_) = false;
  Status outcome_ ZINF_GUARDED_BY(mutex_);
};

// The other ranks, each time another one first: so that not all send to one.
template <typename Do>
void for_others(const Comm& comm, const Do& what) {
  for (int i = 1; i < comm.size(); ++i) {
    what((comm.rank() + i) % comm.size());
  }
}

template <typename T>
std::span<T> part(std::span<T> all, int rank, std::size_t size) {
  return all.subspan(static_cast<std::size_t>(rank) * size, size);
}

template <typename T>
void check_parts(const Comm& comm, std::span<T> all, std::size_t own) {
  ZINF_CHECK(all.size() == own * static_cast<std::size_t>(comm.size()),
             "%zu elements for %d ranks, %zu of one", all.size(), comm.size(),
             own);
}

// Of equal size, in the order of ranks.
template <typename T>
void sum_parts(std::span<const T> parts, std::span<T> sum) {
  std::memcpy(sum.data(), parts.data(), sum.size_bytes());
  for (std::size_t at = sum.size(); at < parts.size(); at += sum.size()) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += parts[at + i];
  }
}

template <typename T>
std::unique_ptr<Move> reduce_at_each(Comm& comm, std::span<T> values) {
  struct Buffers {
    std::vector<T> own;  // `values` may be read before all was sent
    std::vector<T> all;
  };
  auto buffers = std::make_shared<Buffers>();
  buffers->own.assign(values.begin(), values.end());
  buffers->all.resize(values.size() * static_cast<std::size_t>(comm.size()));
  std::vector<std::unique_ptr<Move>> moves;
  moves.push_back(all_gather(comm, std::as_bytes(std::span(buffers->own)),
                             std::as_writable_bytes(std::span(buffers->all))));
  return std::make_unique<Together>(std::move(moves), [buffers, values] {
    sum_parts(std::span<const T>(buffers->all), values);
    return Status();
  });
}

}  // namespace

std::unique_ptr<Move> all_gather(Comm& comm, std::span<const std::byte> own,
                                 std::span<std::byte> all) {
  check_parts(comm, all, own.size());
  std::vector<std::unique_ptr<Move>> moves;
  for_others(comm, [&](int rank) {
    moves.push_back(
        comm.receive(rank, Lane::kCollectives, part(all, rank, own.size())));
  });
  for_others(comm, [&](int rank) {
    moves.push_back(comm.send(rank, Lane::kCollectives, own));
  });
  std::span<std::byte> mine = part(all, comm.rank(), own.size());
  if (mine.data() != own.data() && !own.empty()) {
    std::memcpy(mine.data(), own.data(), own.size());
  }
  return std::make_unique<Together>(std::move(moves), nullptr);
}

std::unique_ptr<Move> reduce_scatter(Comm& comm, std::span<const float> all,
                                     std::span<float> own) {
  check_parts(comm, all, own.size());
  auto parts = std::make_shared<std::vector<float>>(all.size());
  std::vector<std::unique_ptr<Move>> moves;
  for_others(comm, [&](int rank) {
    std::span<float> into = part(std::span(*parts), rank, own.size());
    moves.push_back(
        comm.receive(rank, Lane::kCollectives, std::as_writable_bytes(into)));
  });
  for_others(comm, [&](int rank) {
    moves.push_back(comm.send(rank, Lane::kCollectives,
                              std::as_bytes(part(all, rank, own.size()))));
  });
  const int rank = comm.rank();
  return std::make_unique<Together>(std::move(moves), [=] {
    std::span<float> mine = part(std::span(*parts), rank, own.size());
    std::memcpy(mine.data(), part(all, rank, own.size()).data(),
                mine.size_bytes());
    sum_parts(std::span<const float>(*parts), own);
    return Status();
  });
}

std::unique_ptr<Move> all_reduce(Comm& comm, std::span<float> values) {
  return reduce_at_each(comm, values);
}

std::unique_ptr<Move> all_reduce(Comm& comm, std::span<double> values) {
  return reduce_at_each(comm, values);
}

std::unique_ptr<Move> broadcast(Comm& comm, int root,
                                std::span<std::byte> content) {
  std::vector<std::unique_ptr<Move>> moves;
  if (comm.rank() != root) {
    moves.push_back(comm.receive(root, Lane::kCollectives, content));
  } else {
    for_others(comm, [&](int rank) {
      moves.push_back(comm.send(rank, Lane::kCollectives, content));
    });
  }
  return std::make_unique<Together>(std::move(moves), nullptr);
}

std::unique_ptr<Move> barrier(Comm& comm) {
  struct Word {
    std::byte own{};
    std::vector<std::byte> all;
  };
  auto word = std::make_shared<Word>();
  word->all.resize(static_cast<std::size_t>(comm.size()));
  std::vector<std::unique_ptr<Move>> moves;
  moves.push_back(all_gather(comm, {&word->own, 1}, word->all));
  return std::make_unique<Together>(std::move(moves),
                                    [word] { return Status(); });
}

}  // namespace zinf
