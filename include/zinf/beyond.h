// What the papers did not study, by the same simulator: projections, not
// measurements.
#pragma once

#include <string>
#include <vector>

#include "zinf/status.h"

namespace zinf::plan {

struct TextTable {
  std::string title;
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  std::string remark;
};

// 20T on 512 V100s when activations go to NVMe; pretraining against
// fine-tuning; small batches and the network; mechanisms alone and together.
Result<std::vector<TextTable>> beyond_tables();

// Each mechanism alone, each pair, and all of them: times as fast as with none.
Result<TextTable> interactions();

}  // namespace zinf::plan
