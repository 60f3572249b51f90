#include "src/plan/simulation.h"

#include <algorithm>
#include <initializer_list>
#include <span>
#include <vector>

#include "src/plan/constants.h"
#include "src/plan/timeline.h"

namespace zinf::plan {
namespace {

// The first step begins with empty lanes; the time of all of them counts, so
// that what makes a task longer makes the sum longer.
constexpr int kSteps = 4;

// By state: whether a step begins with it in memory, because the plan does
// something else with it before it is fetched, or nothing.
std::vector<bool> states_here(const Plan* plan, std::size_t count) {
  std::vector<bool> here(count, true);
  if (plan == nullptr) return here;
  std::vector<bool> seen(count);
  for (const Action& action : plan->actions) {
    if (!seen[action.state])
      here[action.state] = action.kind != ActionKind::kFetch;
    seen[action.state] = true;
  }
  return here;
}

class Simulation {
 public:
  Simulation(const Setup& setup, const Program& program,
             const LayerCosts& costs, const Plan* plan)
      : setup_(setup),
        by_(setup.mechanisms),
        program_(program),
        costs_(costs),
        plan_(plan),
        states_(nvme_states(setup, program)),
        read_(states_.size()),
        written_(states_.size()),
        changed_(states_.size()),
        here_(states_here(plan, states_.size())),
        layers_(program.index.layers) {}

  StepForecast run() {
    for (int step = 0; step < kSteps; ++step) run_step();
    forecast_.seconds = line_.end() / kSteps;
    forecast_.compute_seconds = costs_.model_seconds * double(layers_.size());
    for (std::size_t i = 0; i < kLanes; ++i) {
      LaneForecast& lane = forecast_.lanes[i];
      lane.busy_seconds = line_.busy(static_cast<Lane>(i)) / kSteps;
      lane.bytes /= kSteps;
    }
    return forecast_;
  }

 private:
  struct Layer {
    Moment updated = 0;     // the new weight is where weights live
    Moment stored = 0;      // activations for backward
    Moment grad_ready = 0;  // where the update is made
    bool holds = false;     // activations that backward will use
  };
  // What a position waits for, issued ahead of it.
  struct Ahead {
    Moment copied = 0;
    Moment gathered = 0;
    Moment loaded = 0;
    bool loads = false;  // issued
  };

  void run_step() {
    ahead_.assign(program_.positions.size(), {});
    next_copy_ = 0;
    next_gather_ = 0;
    Moment backward_begin = 0;
    for (std::size_t p = 0; p < program_.positions.size(); ++p) {
      const Position& position = program_.positions[p];
      if (plan_ != nullptr) move(plan_->at(p));
      issue_ahead(p);
      switch (position.work) {
        case Work::kForward:
          forward(position, p);
          backward_begin = reached_;
          break;
        case Work::kBackward:
          backward(position, p);
          if (position.layer == 0 && position.last)
            end_backward(backward_begin);
          break;
        case Work::kUpdate:
          update(position.layer);
          break;
      }
    }
    if (by_.update_in_backward) return;
    for (const Layer& layer : layers_)
      reached_ = std::max(reached_, layer.updated);
  }

  Moment issue(Lane lane, Cost cost, double share,
               std::initializer_list<Moment> after) {
    if (cost.nothing()) {
      Moment latest = 0;
      for (const Moment one : after) latest = std::max(latest, one);
      return latest;
    }
    forecast_.lanes[static_cast<std::size_t>(lane)].bytes += share * cost.bytes;
    return line_.add(lane, share * cost.seconds, after);
  }
  Moment issue_nvme(Lane lane, double bytes,
                    std::initializer_list<Moment> after) {
    if (bytes <= 0) return issue(lane, {}, 1, after);
    const double second =
        lane == Lane::kNvmeRead ? costs_.read_second : costs_.write_second;
    const Moment end =
        issue(lane, {.seconds = bytes * second, .bytes = bytes}, 1, after);
    steal(bytes * costs_.drag_second);
    // A drive has less for both ways at once than for each.
    moved_ = std::max(moved_, reached_) + bytes * costs_.move_second;
    line_.hold(lane, moved_);
    return std::max(end, moved_);
  }
  // Where devices compute on the host's cores, others take time from them.
  void steal(double seconds) {
    if (seconds > 0) line_.add(Lane::kCompute, seconds, {});
  }

  // See Note [Plan] in zinf/plan.h.
  void move(std::span<const Action> actions) {
    for (const Action& action : actions) {
      const std::uint32_t state = action.state;
      const double bytes = double(states_[state].bytes);
      switch (action.kind) {
        case ActionKind::kWrite:
          written_[state] =
              issue_nvme(Lane::kNvmeWrite, bytes, {reached_, changed_[state]});
          break;
        case ActionKind::kDrop:
          room_ = std::max(room_, written_[state]);
          here_[state] = false;
          break;
        case ActionKind::kFetch:
          read_[state] = issue_nvme(Lane::kNvmeRead, bytes,
                                    {reached_, room_, written_[state]});
          here_[state] = true;
          // Without prefetching a weight is read when it is used.
          if (!by_.overlap && state < program_.index.layers)
            reached_ = std::max(reached_, read_[state]);
          break;
      }
    }
  }

  bool on_nvme(std::uint32_t state) const { return states_[state].bytes > 0; }

  void issue_ahead(std::size_t now) {
    const std::size_t copies = ahead_end(now, by_.overlap ? kCopiesAhead : 0);
    const std::size_t gathers = ahead_end(now, by_.overlap ? kGathersAhead : 0);
    for (; next_copy_ < copies; ++next_copy_)
      if (!copy(next_copy_, now)) break;
    for (; next_gather_ < std::min(gathers, next_copy_); ++next_gather_)
      gather(next_gather_);
  }

  // Behind the position that computes so many layers later. Updates between
  // them are not on the way.
  std::size_t ahead_end(std::size_t now, int layers) const {
    const auto& positions = program_.positions;
    std::size_t last = now;
    while (layers > 0 && last + 1 < positions.size())
      if (positions[++last].work != Work::kUpdate) --layers;
    return last + 1;
  }

  // False when its weight is not on its way from NVMe yet.
  bool copy(std::size_t p, std::size_t now) {
    const Position& position = program_.positions[p];
    if (position.work == Work::kUpdate) return true;
    const std::uint32_t weight = program_.index.weight(position.layer);
    if (on_nvme(weight) && !here_[weight] && p > now) return false;
    const Layer& layer = layers_[position.layer];
    ahead_[p].copied = issue(Lane::kHostToDevice, costs_.copy_weight, loads(p),
                             {reached_, read_[weight], layer.updated});
    const bool held = position.work == Work::kBackward && layer.holds;
    if (held && by_.overlap_activations) load(p);
    return true;
  }

  void gather(std::size_t p) {
    const Position& position = program_.positions[p];
    if (position.work == Work::kUpdate) return;
    ahead_[p].gathered =
        issue(costs_.collective, costs_.gather, loads(p),
              {reached_, ahead_[p].copied, layers_[position.layer].updated});
  }

  // How often a position needs the weights of its layer.
  double loads(std::size_t p) const {
    const bool twice = program_.positions[p].work == Work::kBackward &&
                       setup_.recompute && by_.load_again;
    return twice ? 2 : 1;
  }

  void load(std::size_t p) {
    const Position& position = program_.positions[p];
    const Moment read =
        issue_nvme(Lane::kNvmeRead, position.share * costs_.activation_bytes,
                   {reached_, layers_[position.layer].stored});
    ahead_[p].loaded = issue(Lane::kHostToDevice, costs_.move_activations,
                             position.share, {read});
    ahead_[p].loads = true;
  }

  void forward(const Position& position, std::size_t p) {
    Layer& layer = layers_[position.layer];
    reached_ =
        line_.add(Lane::kCompute, position.share * costs_.forward_seconds,
                  {reached_, ahead_[p].gathered});
    const Moment copied = issue(Lane::kDeviceToHost, costs_.move_activations,
                                position.share, {reached_});
    layer.stored = issue_nvme(
        Lane::kNvmeWrite, position.share * costs_.activation_bytes, {copied});
    layer.holds = true;
    if (!by_.overlap_activations) reached_ = std::max(reached_, layer.stored);
  }

  void backward(const Position& position, std::size_t p) {
    Layer& layer = layers_[position.layer];
    if (!ahead_[p].loads) load(p);
    layer.holds = false;
    reached_ =
        line_.add(Lane::kCompute, position.share * costs_.backward_seconds,
                  {reached_, ahead_[p].gathered, ahead_[p].loaded});
    Moment reduced = issue(costs_.collective, costs_.reduce, 1, {reached_});
    if (position.last)
      reduced = issue(Lane::kNetwork, costs_.sum_nodes, 1, {reduced});
    if (!by_.overlap) reached_ = std::max(reached_, reduced);
    layer.grad_ready =
        issue(Lane::kDeviceToHost, costs_.copy_grad, 1, {reduced});
    if (!by_.overlap_grads && !costs_.copy_grad.nothing())
      reached_ = std::max(reached_, layer.grad_ready);
    changed_[program_.index.grad(position.layer)] = layer.grad_ready;
  }

  void end_backward(Moment begin) {
    Moment end = reached_;
    for (const Layer& layer : layers_) end = std::max(end, layer.grad_ready);
    forecast_.backward_seconds = end - begin;
    if (!by_.update_in_backward) reached_ = end;
  }

  void update(std::uint32_t index) {
    Layer& layer = layers_[index];
    const std::uint32_t states = program_.index.states(index);
    const std::uint32_t weight = program_.index.weight(index);
    const Moment done = issue(
        Lane::kUpdate, costs_.update, 1,
        {layer.grad_ready, read_[states], read_[program_.index.grad(index)],
         read_[weight], by_.update_in_backward ? 0 : reached_});
    if (setup_.cluster.on_host) steal(costs_.update.seconds);
    changed_[states] = done;
    changed_[weight] = done;
    const Moment sent =
        issue(Lane::kHostToDevice, costs_.send_weight, 1, {done});
    layer.updated = issue(costs_.collective, costs_.spread_weight, 1, {sent});
    if (!by_.update_in_backward) reached_ = done;
  }

  const Setup& setup_;
  const Mechanisms& by_;
  const Program& program_;
  const LayerCosts& costs_;
  const Plan* const plan_;
  Timeline line_;
  StepForecast forecast_;
  Moment reached_ = 0;  // the position's turn has come
  Moment room_ = 0;     // memory that the plan counts on is given back
  Moment moved_ = 0;    // what was issued to NVMe, both ways
  std::size_t next_copy_ = 0;
  std::size_t next_gather_ = 0;
  std::vector<Ahead> ahead_;  // by position
  // By state on NVMe.
  std::vector<PlanState> states_;
  std::vector<Moment> read_;
  std::vector<Moment> written_;
  std::vector<Moment> changed_;
  std::vector<bool> here_;
  std::vector<Layer> layers_;
};

}  // namespace

StepForecast simulate_step(const Setup& setup, const Program& program,
                           const LayerCosts& costs, const Plan* plan) {
  return Simulation(setup, program, costs, plan).run();
}

}  // namespace zinf::plan
