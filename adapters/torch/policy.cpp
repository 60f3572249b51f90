#include "adapters/torch/policy.h"

#include <ATen/core/enum_tag.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace zinf {
namespace {

// These look at sizes and types only, or at the graph.
const std::unordered_set<std::string_view>& need_no_data() {
  static const std::unordered_set<std::string_view> names = {
      "aten::empty_like",   "aten::zeros_like",
      "aten::ones_like",    "aten::full_like",
      "aten::rand_like",    "aten::randn_like",
      "aten::randint_like", "aten::new_empty",
      "aten::new_zeros",    "aten::new_ones",
      "aten::new_full",     "aten::new_empty_strided",
      "aten::is_same_size", "aten::_has_compatible_shallow_copy_type",
      "aten::is_pinned",    "aten::record_stream",
      "aten::sym_size",     "aten::sym_stride",
      "aten::sym_numel",    "aten::sym_storage_offset",
      "aten::size",         "aten::stride",
      "aten::numel",        "aten::dim",
      "aten::detach_",
  };
  return names;
}

bool can_hold_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::ScalarTypeType:
      return false;
    default:
      return true;
  }
}

// Views that never copy.
const std::unordered_set<std::string_view>& views() {
  static const auto* names = new std::unordered_set<std::string_view>{
      "aten::alias",  "aten::as_strided", "aten::detach", "aten::expand",
      "aten::narrow", "aten::permute",    "aten::select", "aten::slice",
      "aten::split",  "aten::squeeze",    "aten::t",      "aten::transpose",
      "aten::unbind", "aten::unsqueeze",  "aten::view",   "aten::view_as"};
  return *names;
}

// Norms over batches change running statistics, which most of their schemas
// declare as read: where this argument is true, or always.
const std::unordered_map<std::string_view, std::string_view>&
change_statistics() {
  static const auto* names =
      new std::unordered_map<std::string_view, std::string_view>{
          {"aten::batch_norm", "training"},
          {"aten::_batch_norm_impl_index", "training"},
          {"aten::native_batch_norm", "training"},
          {"aten::_native_batch_norm_legit", "training"},
          {"aten::cudnn_batch_norm", "training"},
          {"aten::miopen_batch_norm", "training"},
          {"aten::instance_norm", "use_input_stats"},
          {"aten::batch_norm_update_stats", ""},
          {"aten::batch_norm_gather_stats", ""},
          {"aten::batch_norm_gather_stats_with_counts", ""}};
  return *names;
}

bool starts_with(std::string_view name, std::string_view prefix) {
  return name.substr(0, prefix.size()) == prefix;
}

Policy make_policy(const c10::FunctionSchema& schema) {
  Policy policy{.name = schema.operator_name()};
  policy.num_arguments = schema.arguments().size();
  std::string_view name = schema.name();
  // A start that is a tensor is read.
  bool reads_start =
      name == "aten::narrow" && schema.overload_name() == "Tensor";
  policy.complete = views().contains(name) && !reads_start;
  if (policy.complete || need_no_data().contains(name)) return policy;
  bool aten = starts_with(name, "aten::") || starts_with(name, "prim::");
  policy.trusted = aten;
  auto statistics = change_statistics().find(name);
  bool changes_statistics = statistics != change_statistics().end();
  bool skipped = false;
  for (std::size_t i = 0; i < policy.num_arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* alias = argument.alias_info();
    bool write = alias != nullptr && alias->isWrite();
    bool statistic =
        changes_statistics && starts_with(argument.name(), "running_");
    if (statistic) write = true;
    if (changes_statistics && argument.name() == statistics->second) {
      policy.changes_if = static_cast<std::uint16_t>(i);
    }
    // A view needs no data; what looks like one but copies calls operators
    // that do.
    if (alias != nullptr && !write && aten) {
      skipped = true;
      continue;
    }
    if (!can_hold_tensors(*argument.type())) continue;
    policy.arguments.push_back({.index = static_cast<std::uint16_t>(i),
                                .use = write ? Use::kChange : Use::kRead,
                                .only_if = statistic});
  }
  policy.complete = aten && !skipped && !policy.arguments.empty();
  if (name == "aten::cat") {
    policy.pieces = Policy::Pieces::kCat;
  } else if (starts_with(name, "aten::_foreach_") ||
             starts_with(name, "aten::_amp_foreach_") ||
             starts_with(name, "aten::_fused_ad") ||
             starts_with(name, "aten::_fused_sgd")) {
    policy.pieces = Policy::Pieces::kElements;
  }
  if (schema.overload_name().find("out") != std::string::npos) {
    policy.pieces = Policy::Pieces::kNone;
  }
  return policy;
}

}  // namespace

const Policy& policy_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Policy> policies;
  const c10::FunctionSchema& schema = op.schema();
  auto found = policies.find(&schema);
  // An operator that is defined again may get the address of another.
  if (found != policies.end() && found->second.name == op.operator_name() &&
      found->second.num_arguments == schema.arguments().size()) {
    return found->second;
  }
  Policy policy = make_policy(schema);
  // Norms over batches change their statistics, and do not say so.
  policy.repeats = !schema.is_mutable() &&
                   !op.hasTag(at::Tag::nondeterministic_seeded) &&
                   !op.hasTag(at::Tag::maybe_aliasing_or_mutating) &&
                   schema.name().find("_norm") == std::string::npos;
  return policies.insert_or_assign(&schema, std::move(policy)).first->second;
}

}  // namespace zinf
