// zinf plan: what fits, where it goes and how fast, before there is a machine.
#include <algorithm>
#include <cstdio>

#include "cli/command.h"
#include "cli/plan_paper.h"
#include "cli/progress.h"
#include "src/base/strf.h"
#include "zinf/advice.h"
#include "zinf/advice_text.h"
#include "zinf/machine.h"
#include "zinf/model_config.h"
#include "zinf/this_machine.h"

namespace zinf::cli {
namespace {

Status invalid(const char* text) { return Status::error(Code::kInvalid, text); }

Result<plan::ModelShape> make_shape(const PlanArguments& args) {
  const bool sizes = args.layers > 0 || args.hidden > 0;
  if (!args.model.empty() && (sizes || args.vocab > 0)) {
    return invalid(
        "a model and sizes contradict each other: name the one or the other");
  }
  if (args.model.empty() && !sizes) {
    return invalid(
        "no model: name a config.json or .safetensors file, or say --layers, "
        "--hidden, --heads and --vocab");
  }
  plan::ModelShape shape{.name = "transformer",
                         .layers = args.layers,
                         .hidden = args.hidden,
                         .heads = args.heads,
                         .vocab = args.vocab};
  if (!args.model.empty()) {
    ZINF_ASSIGN(shape, plan::load_model(args.model));
  }
  if (args.heads > 0) shape.heads = args.heads;
  if (args.model.empty() && args.heads == 0)
    shape.heads = plan::usual_heads(shape.hidden);
  if (args.seq > 0) shape.seq = args.seq;
  ZINF_TRY(check(shape));
  return shape;
}

// CPUs without instructions for bf16 are useless in it.
std::string usual_precision(const plan::Cluster& cluster) {
  if (!cluster.on_host) return "bf16";
  for (const std::string& name : inspect_machine().isa)
    if (name.find("bf16") != std::string::npos) return "bf16";
  return "fp32";
}

Result<plan::Request> make_request(const PlanArguments& args) {
  plan::Request request;
  ZINF_ASSIGN(request.shape, make_shape(args));
  if (args.cluster.empty() || args.cluster == "this") {
    const std::string path = args.path.empty() ? "." : args.path;
    Progress progress("measuring this machine", plan::kMeasuringSteps,
                      Progress::Unit::kSteps);
    ZINF_ASSIGN(request.cluster,
                plan::measure_this_machine(
                    path, [&](std::uint64_t done) { progress.update(done); }));
  } else if (!args.path.empty()) {
    return invalid(
        "--path is for --cluster this: other clusters are not measured");
  } else {
    ZINF_ASSIGN(request.cluster, plan::load_cluster(args.cluster));
  }
  request.precision = args.precision.empty() ? usual_precision(request.cluster)
                                             : args.precision;
  request.recompute = !args.no_recompute;
  request.tokens = args.tokens;
  ZINF_TRY(set_all(request, args.changes));
  ZINF_TRY(check(request));
  return request;
}

// The tables of --paper and --beyond are what they are.
Status check_tables(const PlanArguments& args) {
  if (!args.paper && !args.beyond) return {};
  if (args.paper && args.beyond)
    return invalid("--paper and --beyond contradict each other: ask for one");
  const bool sizes = args.layers > 0 || args.hidden > 0 || args.heads > 0 ||
                     args.vocab > 0 || args.seq > 0;
  const bool changed = !args.changes.empty() || !args.precision.empty() ||
                       args.no_recompute || args.tokens > 0 ||
                       !args.cluster.empty() || !args.path.empty();
  if (args.model.empty() && !sizes && !changed && args.what_if.empty())
    return {};
  return Status::error(
      Code::kInvalid,
      strf(
          "%s prints tables of models and machines of its own: a model, sizes, "
          "--cluster, --what-if or another change of a plan contradict it",
          args.paper ? "--paper" : "--beyond"));
}

template <typename... What>
void print(const PlanArguments& args, const What&... what) {
  const std::string text =
      args.json ? json_of(what...) + "\n" : text_of(what...);
  std::fputs(text.c_str(), stdout);
}

Status run_sweep(const PlanArguments& args, const plan::Request& request) {
  ZINF_ASSIGN(const std::vector<plan::Varied> sweep,
              plan::sweep(request, args.what_if));
  print(args, sweep);
  const bool any = std::ranges::any_of(
      sweep, [](const plan::Varied& one) { return one.advice.fits(); });
  if (any) return {};
  return Status::error(Code::kOverBudget, "plan: none of them fits");
}

}  // namespace

Status run_plan(const PlanArguments& args) {
  ZINF_TRY(check_tables(args));
  const Output output = args.json ? Output::kJson : Output::kText;
  if (args.paper) return print_paper(output);
  if (args.beyond) return print_beyond(output);
  ZINF_ASSIGN(const plan::Request request, make_request(args));
  if (!args.what_if.empty()) return run_sweep(args, request);
  ZINF_ASSIGN(const plan::Advice advice, plan::advise(request));
  print(args, request, advice);
  if (advice.fits()) return {};
  return Status::error(Code::kOverBudget, "plan: it does not fit");
}

}  // namespace zinf::cli
