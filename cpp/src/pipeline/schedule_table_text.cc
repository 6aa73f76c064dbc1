#include "schedule_table_text.h"

#include <algorithm>

#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

constexpr size_t kMaxTableRanks = 16;
constexpr int64_t kMaxCells = 24;    // longer rows are cut
constexpr int64_t kCellsBefore = 8;  // of the first mark in a cut row

std::string row_text(std::span<const Action> actions, int rank, const std::vector<Mark>& marks) {
  const auto length = static_cast<int64_t>(actions.size());
  int64_t first_mark = length + 1;
  for (const Mark& mark : marks) {
    if (mark.rank == rank) first_mark = std::min(first_mark, mark.position);
  }
  int64_t begin = 0;
  if (length > kMaxCells && first_mark <= length) {
    begin = std::clamp<int64_t>(first_mark - kCellsBefore, 0, length - kMaxCells);
  }
  const int64_t end = std::min(length, begin + kMaxCells);

  std::string text = base::format_text("rank {}:", rank);
  if (begin > 0) text += base::format_text(" ({} more)", begin);
  for (int64_t position = begin; position < end; ++position) {
    const bool marked = std::any_of(marks.begin(), marks.end(), [&](const Mark& mark) {
      return mark.rank == rank && mark.position == position;
    });
    text += marked ? " >" : " ";
    append_text(actions[static_cast<size_t>(position)], text);
    if (marked) text += '<';
  }
  if (end < length) text += base::format_text(" ({} more)", length - end);
  if (first_mark == length) text += " >end<";
  return text + "\n";
}

}  // namespace

std::string marked_table(const std::vector<std::span<const Action>>& rows,
                         const std::vector<Mark>& marks) {
  std::string text;
  size_t num_shown = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    const int rank = static_cast<int>(row);
    const bool marked = std::any_of(marks.begin(), marks.end(),
                                    [&](const Mark& mark) { return mark.rank == rank; });
    if ((!marked && rows.size() > kMaxTableRanks) || num_shown == kMaxTableRanks) continue;
    text += row_text(rows[row], rank, marks);
    ++num_shown;
  }
  if (num_shown < rows.size())
    text += base::format_text("({} more ranks)\n", rows.size() - num_shown);
  return text;
}

}  // namespace megacore::pipeline
