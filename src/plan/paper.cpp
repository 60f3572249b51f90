#include "zinf/paper.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "src/plan/paper_parts.h"

namespace zinf::plan {

double PaperCell::paper() const {
  return std::strtod(printed.c_str(), nullptr);
}

double PaperCell::error() const {
  if (says == Says::kMoreThan && ours > paper()) return 0;
  return std::abs(ours - paper()) / std::abs(paper());
}

double PaperCell::last_digit() const {
  const std::size_t point = printed.find('.');
  if (point == std::string::npos) return 1;
  return std::pow(10, -double(printed.size() - point - 1));
}

double PaperTable::mean_error() const {
  double sum = 0;
  double count = 0;
  for (const PaperCell& cell : cells) {
    if (cell.paper_errs) continue;
    sum += cell.error();
    ++count;
  }
  return count > 0 ? sum / count : 0;
}

double PaperTable::worst_error() const {
  double worst = 0;
  for (const PaperCell& cell : cells)
    if (!cell.paper_errs) worst = std::max(worst, cell.error());
  return worst;
}

Result<std::vector<PaperTable>> paper_tables() {
  std::vector<PaperTable> tables = {zero_table_1(), figure_2a(), figure_3(),
                                    figure_1(),     figure_6a(), table_3()};
  for (const auto& simulated :
       {figure_5a, figure_5b, figure_5c, figure_6c, figure_6d, figure_6e}) {
    ZINF_ASSIGN(PaperTable table, simulated());
    tables.push_back(std::move(table));
  }
  return tables;
}

}  // namespace zinf::plan
