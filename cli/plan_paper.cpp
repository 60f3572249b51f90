#include "cli/plan_paper.h"

#include <algorithm>
#include <cstdio>

#include "src/base/json.h"
#include "src/base/strf.h"
#include "zinf/beyond.h"
#include "zinf/paper.h"

namespace zinf::cli {
namespace {

using plan::PaperCell;
using plan::PaperTable;

std::string number_text(double value) {
  if (value >= 1000) return strf("%.0f", value);
  return strf(value >= 100 ? "%.1f" : value >= 10 ? "%.2f" : "%.3f", value);
}

std::string difference(const PaperCell& cell) {
  if (cell.paper_errs) return "paper";
  if (cell.says == plan::Says::kMoreThan && cell.error() == 0) return "holds";
  return strf("%+.1f%%", 100 * (cell.ours / cell.paper() - 1));
}

void print_table(const PaperTable& table) {
  std::printf("%s: %s (%s)\n", table.id.c_str(), table.title.c_str(),
              table.unit.c_str());
  std::size_t row = 0;
  std::size_t column = 0;
  for (const PaperCell& cell : table.cells) {
    row = std::max(row, cell.row.size());
    column = std::max(column, cell.column.size());
  }
  for (const PaperCell& cell : table.cells) {
    const char* says = cell.says == plan::Says::kMoreThan ? ">" : " ";
    const std::string error = difference(cell);
    std::printf(
        "  %-*s  %-*s  paper %s%8s  ours %9s  %7s%s%s\n", static_cast<int>(row),
        cell.row.c_str(), static_cast<int>(column), cell.column.c_str(), says,
        cell.printed.c_str(), number_text(cell.ours).c_str(), error.c_str(),
        cell.note.empty() ? "" : "  ", cell.note.c_str());
  }
  std::printf("  mean error %.1f%%, worst %.1f%%\n", 100 * table.mean_error(),
              100 * table.worst_error());
  if (!table.remark.empty()) std::printf("  %s\n", table.remark.c_str());
  std::printf("\n");
}

JsonObject json_of(const PaperTable& table) {
  std::vector<JsonObject> cells;
  cells.reserve(table.cells.size());
  for (const PaperCell& cell : table.cells) {
    cells.push_back(JsonObject()
                        .add("row", cell.row)
                        .add("column", cell.column)
                        .add("paper", cell.paper())
                        .add("printed", cell.printed)
                        .add("ours", cell.ours)
                        .add("more_than", cell.says == plan::Says::kMoreThan)
                        .add("paper_errs", cell.paper_errs)
                        .add("error", cell.error())
                        .add("note", cell.note));
  }
  return JsonObject()
      .add("id", table.id)
      .add("title", table.title)
      .add("unit", table.unit)
      .add("simulated", table.simulated)
      .add("mean_error", table.mean_error())
      .add("worst_error", table.worst_error())
      .add("remark", table.remark)
      .add("cells", cells);
}

void print_text(const plan::TextTable& table) {
  std::printf("%s\n", table.title.c_str());
  std::vector<std::size_t> widths(table.header.size());
  const auto widen = [&](const std::vector<std::string>& row) {
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], row[i].size());
  };
  widen(table.header);
  for (const auto& row : table.rows) widen(row);
  const auto print = [&](const std::vector<std::string>& row) {
    for (std::size_t i = 0; i < row.size(); ++i)
      std::printf("  %-*s", static_cast<int>(widths[i]), row[i].c_str());
    std::printf("\n");
  };
  print(table.header);
  for (const auto& row : table.rows) print(row);
  std::printf("  %s\n\n", table.remark.c_str());
}

JsonObject json_of(const plan::TextTable& table) {
  std::vector<JsonObject> rows;
  for (const auto& row : table.rows) {
    JsonObject cells;
    for (std::size_t i = 0; i < row.size(); ++i)
      cells.add(table.header[i], row[i]);
    rows.push_back(cells);
  }
  return JsonObject()
      .add("title", table.title)
      .add("header", table.header)
      .add("rows", rows)
      .add("remark", table.remark);
}

JsonObject json_of(const plan::EfficiencyCurve& curve) {
  return JsonObject()
      .add("state", curve.state)
      .add("label", curve.label)
      .add("bytes_per_second", curve.bytes_per_second)
      .add("efficiency", curve.efficiency);
}

template <typename Part>
std::vector<JsonObject> json_list(const std::vector<Part>& parts) {
  std::vector<JsonObject> all;
  all.reserve(parts.size());
  for (const Part& part : parts) all.push_back(json_of(part));
  return all;
}

}  // namespace

Status print_paper(Output output) {
  ZINF_ASSIGN(const std::vector<PaperTable> tables, plan::paper_tables());
  if (output == Output::kJson) {
    const JsonObject json =
        JsonObject()
            .add("tables", json_list(tables))
            .add("curves", json_list(plan::efficiency_curves()));
    std::printf("%s\n", json.text().c_str());
    return {};
  }
  double sum = 0;
  double count = 0;
  for (const PaperTable& table : tables) {
    print_table(table);
    if (!table.simulated) continue;
    sum += table.mean_error() * double(table.cells.size());
    count += double(table.cells.size());
  }
  std::printf("simulated cells: %.0f, mean error %.1f%%\n", count,
              100 * sum / count);
  return {};
}

Status print_beyond(Output output) {
  ZINF_ASSIGN(const std::vector<plan::TextTable> tables, plan::beyond_tables());
  if (output == Output::kJson) {
    std::printf("%s\n",
                JsonObject().add("tables", json_list(tables)).text().c_str());
    return {};
  }
  for (const plan::TextTable& table : tables) print_text(table);
  return {};
}

}  // namespace zinf::cli
