// Note [Timing]: a move wishes for as many positions as its bytes take, in a
// lane that has one move at a time. Then memory is dealt out in the order of
// the trace, no read before one that is needed earlier: so the next to be used
// is never short of memory because of a later one. Everything goes round twice,
// as the begin of a step depends on its end. Small moves in a row wish to start
// together, reads with the first and writes with the last, as one request.
#include "src/sched/timing.h"

#include <algorithm>
#include <utility>

#include "src/sched/load.h"

namespace zinf::sched {
namespace {

std::vector<std::int64_t> used_and_kept(const Gaps& found,
                                        const std::vector<bool>& kept) {
  ArcSums arcs(found.used_bytes.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const Gap& gap = found.gaps[i];
    if (gap.holds && kept[i])
      arcs.add(gap.first, gap.length, static_cast<std::int64_t>(gap.bytes));
  }
  std::vector<std::int64_t> bytes = std::move(arcs).sums();
  for (std::size_t p = 0; p < bytes.size(); ++p)
    bytes[p] += found.used_bytes[p];
  return bytes;
}

class Timing {
 public:
  Timing(const Gaps& found, const std::vector<bool>& kept,
         const PlanInput& input)
      : gaps_(found.gaps),
        input_(input),
        budget_(static_cast<std::int64_t>(
            std::min(input.budget_bytes, kMostBytes))),
        request_bytes_(std::min(input.request_bytes, input.ahead_bytes / 2)),
        round_(static_cast<std::uint32_t>(found.used_bytes.size())),
        load_(used_and_kept(found, kept)) {
    const Traffic sum = traffic(gaps_, kept, input.states.size());
    for (std::uint32_t i = 0; i < gaps_.size(); ++i)
      if (gaps_[i].holds && !kept[i])
        dropped_.push_back({.gap = i, .writes = sum.writes[i]});
    for (Dropped& d : dropped_)
      if (gaps_[d.gap].reads) reads_.push_back(&d);
    std::ranges::sort(reads_, {},
                      [&](Dropped* d) { return std::pair(end(*d), d->gap); });
  }

  std::vector<Dropped> run() {
    set_clock();
    if (clock_.back() <= 0) return std::move(dropped_);  // no time to hide in
    join_writes();
    wish_behind();
    wish_ahead();
    join_reads();
    for (int round = 0; round < 2; ++round) deal();
    return std::move(dropped_);
  }

 private:
  std::int64_t bytes(std::uint32_t gap) const {
    return static_cast<std::int64_t>(gaps_[gap].bytes);
  }
  // Positions of the uses before and after.
  std::uint32_t begin(const Dropped& d) const {
    return (gaps_[d.gap].first + round_ - 1) % round_;
  }
  std::uint32_t end(const Dropped& d) const {
    return (gaps_[d.gap].first + gaps_[d.gap].length) % round_;
  }
  double read_seconds(const Dropped& d) const {
    return double(gaps_[d.gap].bytes) / input_.read_bytes_per_second;
  }
  double write_seconds(const Dropped& d) const {
    return double(gaps_[d.gap].bytes) / input_.write_bytes_per_second;
  }

  // clock_[p] is when position p begins. A step is no shorter than its moves:
  // what compute lacks is spread over the positions that need them.
  void set_clock() {
    std::vector<double> moves(round_);
    double reading = 0;
    double writing = 0;
    for (const Dropped* d : reads_) {
      moves[end(*d)] += read_seconds(*d);
      reading += read_seconds(*d);
    }
    for (const Dropped& d : dropped_) {
      if (!d.writes) continue;
      moves[begin(d)] += write_seconds(d);
      writing += write_seconds(d);
    }
    double compute = 0;
    for (const double seconds : input_.compute_seconds) compute += seconds;
    const double lacks = std::max(0.0, std::max(reading, writing) - compute);
    const double share = lacks > 0 ? lacks / (reading + writing) : 0;
    clock_.assign(1, 0);
    for (std::size_t p = 0; p < round_; ++p) {
      const double computes =
          input_.compute_seconds.empty() ? 0 : input_.compute_seconds[p];
      clock_.push_back(clock_.back() + computes + share * moves[p]);
    }
  }
  double when(std::uint64_t round, std::uint32_t position) const {
    return double(round) * clock_.back() + clock_[position];
  }
  // The first position, of all rounds, that begins at `time` or later, and the
  // last that begins then or earlier.
  std::uint64_t first_after(double time) const {
    const auto round = static_cast<std::uint64_t>(time / clock_.back());
    const double rest = time - when(round, 0);
    const auto found = std::ranges::lower_bound(clock_, rest);
    return round * round_ +
           std::min<std::uint64_t>(found - clock_.begin(), round_);
  }
  std::uint64_t last_before(double time) const {
    const auto round = static_cast<std::uint64_t>(time / clock_.back());
    const double rest = time - when(round, 0);
    const auto found = std::upper_bound(clock_.begin() + 1, clock_.end(), rest);
    return round * round_ + (found - clock_.begin() - 1);
  }

  // Counts moves in their order: whether this one is to join those before it.
  class Run {
   public:
    explicit Run(std::uint64_t request_bytes) : limit_(request_bytes) {}
    bool add(std::uint64_t bytes) {
      const bool joins = bytes_ > 0 && bytes_ < limit_ && bytes < limit_;
      bytes_ = joins ? bytes_ + bytes : bytes;
      return joins;
    }

   private:
    const std::uint64_t limit_;
    std::uint64_t bytes_ = 0;
  };

  void join_writes() {
    delay_.resize(gaps_.size());
    Run run(request_bytes_);
    std::vector<std::uint32_t> joined;
    std::uint32_t last = 0;
    const auto end_run = [&] {
      for (const std::uint32_t i : joined)
        delay_[dropped_[i].gap] = last - begin(dropped_[i]);
      joined.clear();
    };
    for (std::uint32_t i = 0; i < dropped_.size(); ++i) {
      if (!dropped_[i].writes) continue;
      if (!run.add(gaps_[dropped_[i].gap].bytes)) end_run();
      joined.push_back(i);
      last = begin(dropped_[i]);
    }
    end_run();
  }

  void join_reads() {
    Run run(request_bytes_);
    const Dropped* first = nullptr;
    for (const Dropped* d : reads_) {
      if (!run.add(gaps_[d->gap].bytes)) {
        first = d;
        continue;
      }
      const std::uint32_t start = ahead_[first->gap] + end(*d) - end(*first);
      ahead_[d->gap] = std::min(std::max(ahead_[d->gap], start), round_);
    }
  }

  // Writes start one after the other.
  void wish_behind() {
    behind_.resize(gaps_.size());
    double lane = 0;
    for (std::uint64_t round = 0; round < 2; ++round) {
      for (const Dropped& d : dropped_) {
        if (!d.writes) continue;
        const std::uint32_t first = begin(d) + 1;
        lane = std::max(lane, when(round, first + delay_[d.gap])) +
               write_seconds(d);
        const std::uint64_t done = first_after(lane);
        const std::uint64_t from = round * round_ + first;
        behind_[d.gap] = static_cast<std::uint32_t>(
            std::min<std::uint64_t>(done - std::min(from, done), round_));
      }
    }
  }

  // Reads end one before the other, from the last one backwards.
  void wish_ahead() {
    ahead_.resize(gaps_.size());
    double lane = when(4, 0);
    for (std::uint64_t round = 4; round-- > 2;) {
      for (std::size_t i = reads_.size(); i-- > 0;) {
        const Dropped& d = *reads_[i];
        lane = std::max(0.0,
                        std::min(lane, when(round, end(d))) - read_seconds(d));
        const std::uint64_t start = last_before(lane);
        ahead_[d.gap] = static_cast<std::uint32_t>(
            std::min<std::uint64_t>(round * round_ + end(d) - start, round_));
      }
    }
  }

  void deal() {
    std::size_t read = 0;
    std::size_t drop = 0;
    for (std::uint32_t p = 0; p < round_; ++p) {
      for (; read < reads_.size() && end(*reads_[read]) == p; ++read)
        deal_read(read);
      for (; drop < dropped_.size() && begin(dropped_[drop]) == p; ++drop)
        if (dropped_[drop].writes) deal_write(dropped_[drop]);
    }
  }

  void deal_read(std::size_t index) {
    Dropped& d = *reads_[index];
    if (d.ahead == ahead_[d.gap]) return;
    const Gap& gap = gaps_[d.gap];
    const Dropped& before =
        *reads_[(index + reads_.size() - 1) % reads_.size()];
    const std::uint32_t after_that =
        end(d) + (index == 0 ? round_ : 0) - end(before);
    hold_ahead(d, -bytes(d.gap));
    const std::uint32_t most = std::min(
        {ahead_[d.gap], gap.length - 1 - d.behind, before.ahead + after_that});
    d.ahead = static_cast<std::uint32_t>(
        load_.room_before(end(d), most, budget_ - bytes(d.gap)));
    hold_ahead(d, bytes(d.gap));
  }
  void hold_ahead(const Dropped& d, std::int64_t bytes) {
    load_.add((end(d) + round_ - d.ahead) % round_, d.ahead, bytes);
  }

  void deal_write(Dropped& d) {
    if (d.behind == behind_[d.gap]) return;
    const Gap& gap = gaps_[d.gap];
    load_.add(gap.first, d.behind, -bytes(d.gap));
    const std::uint32_t most =
        std::min(behind_[d.gap], gap.length - 1 - d.ahead);
    d.behind = static_cast<std::uint32_t>(
        load_.room_from(gap.first, most, budget_ - bytes(d.gap)));
    // With less memory than it wishes for, it starts at once, by itself.
    d.delay = d.behind > delay_[d.gap] ? delay_[d.gap] : 0;
    load_.add(gap.first, d.behind, bytes(d.gap));
  }

  const std::vector<Gap>& gaps_;
  const PlanInput& input_;
  const std::int64_t budget_;
  const std::uint64_t request_bytes_;  // half of the memory reads, half writes
  const std::uint32_t round_;
  Load load_;
  std::vector<Dropped> dropped_;  // by the use before
  std::vector<Dropped*> reads_;   // by the use after
  std::vector<double> clock_;
  std::vector<std::uint32_t> delay_;  // wishes, by gap
  std::vector<std::uint32_t> behind_;
  std::vector<std::uint32_t> ahead_;
};

}  // namespace

std::vector<Dropped> time_moves(const Gaps& found,
                                const std::vector<bool>& kept,
                                const PlanInput& input) {
  return Timing(found, kept, input).run();
}

}  // namespace zinf::sched
