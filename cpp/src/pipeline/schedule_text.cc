// Text and CSV forms of a schedule.

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

constexpr std::string_view kHeader = "#megacore v1";
constexpr std::string_view kPairEnd = ")OVERLAP_F_B";

std::string_view strip(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// Cuts the text before `separator` off the front of `rest`.
std::string_view take_until(char separator, std::string_view& rest) {
  const size_t end = std::min(rest.find(separator), rest.size());
  const std::string_view head = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return head;
}

// Collects the rows of a schedule and infers what the rows imply.
class RowReader {
 public:
  void begin_row() { offsets_.push_back(static_cast<int64_t>(actions_.size())); }

  // `where` is called for the text of an error only.
  template <typename Where>
  void add(std::string_view cell, const Where& where) {
    if (!cell.starts_with('(')) return add_action(cell, where);
    std::string_view inner = cell.substr(1);
    const bool ends_well = inner.ends_with(kPairEnd);
    if (ends_well) inner.remove_suffix(kPairEnd.size());
    const auto index = static_cast<int64_t>(actions_.size());
    const std::string_view forward = take_until(';', inner);
    MC_REQUIRE(ends_well && !inner.empty() && inner.find(';') == std::string_view::npos,
               "{}: '{}' is not a pair; a forward that overlaps a backward is written "
               "(0F4;7B2)OVERLAP_F_B",
               where(), cell);
    add_action(forward, where);
    add_action(inner, where);
    overlaps_.push_back(index);
  }

  Schedule finish(std::string name, int num_chains) && {
    MC_REQUIRE(!actions_.empty(), "the schedule is empty; it needs one row per rank");
    for (size_t stage = 0; stage < stage_ranks_.size(); ++stage) {
      MC_REQUIRE(stage_ranks_[stage] >= 0, "no row runs stage {}, but stage {} exists", stage,
                 stage_ranks_.size() - 1);
    }
    const size_t num_rows = offsets_.size();
    offsets_.push_back(static_cast<int64_t>(actions_.size()));
    Placement placement(std::move(stage_ranks_), num_chains);
    MC_REQUIRE(static_cast<size_t>(placement.num_ranks()) == num_rows,
               "row {} runs no stage; every rank needs one", num_rows - 1);
    return {.name = std::move(name),
            .placement = std::move(placement),
            .num_microbatches = num_microbatches_,
            .forward_only = !has_backward_,
            .actions = std::move(actions_),
            .offsets = std::move(offsets_),
            .overlaps = std::move(overlaps_)};
  }

 private:
  // Bounds the tables that a mistyped number such as 2000000000F0 could ask for.
  static constexpr int32_t kMaxNumber = (1 << 20) - 1;

  template <typename Where>
  void add_action(std::string_view cell, const Where& where) {
    Action action;
    try {
      action = parse_action(cell);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(format_text("{}: {}", where(), error.what()));
    }
    MC_REQUIRE(is_compute(action.kind),
               "{}: '{}' is communication; a schedule holds compute actions only (F B I W), and "
               "sends and receives are added by lowering",
               where(), cell);
    place(action, where);
    num_microbatches_ = std::max(num_microbatches_, action.microbatch + 1);
    has_backward_ |= action.kind != ActionKind::kForward;
    actions_.push_back(action);
  }

  template <typename Where>
  void place(const Action& action, const Where& where) {
    MC_REQUIRE(std::max(action.stage, action.microbatch) <= kMaxNumber,
               "{}: a stage or microbatch is above the limit of {}", where(), kMaxNumber);
    const auto stage = static_cast<size_t>(action.stage);
    const auto rank = static_cast<int32_t>(offsets_.size()) - 1;
    if (stage >= stage_ranks_.size()) stage_ranks_.resize(stage + 1, -1);
    if (stage_ranks_[stage] < 0) stage_ranks_[stage] = rank;
    MC_REQUIRE(stage_ranks_[stage] == rank,
               "{}: stage {} runs on rank {} and on rank {}; a stage lives on one rank", where(),
               stage, stage_ranks_[stage], rank);
  }

  std::vector<Action> actions_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> overlaps_;
  std::vector<int32_t> stage_ranks_;
  int32_t num_microbatches_ = 0;
  bool has_backward_ = false;
};

struct Header {
  std::string name = "custom";
  int num_chains = 1;
  // What rows alone cannot tell: that all of the last rank, stage or microbatch, or every backward,
  // is missing.
  std::optional<int> num_ranks = {};
  std::optional<int> num_stages = {};
  std::optional<int> num_microbatches = {};
  std::optional<bool> forward_only = {};
};

// The number behind "key=" if the field has that key.
std::optional<int> number_of(std::string_view field, std::string_view key) {
  if (!field.starts_with(key)) return std::nullopt;
  const std::string_view digits = field.substr(key.size());
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  MC_REQUIRE(error == std::errc() && end == digits.data() + digits.size(),
             "line 1: '{}' should be a number", field);
  return number;
}

Header parse_header(std::string_view line) {
  MC_REQUIRE(line.starts_with(kHeader), "line 1: '{}' should start with '{}'", line, kHeader);
  constexpr std::string_view kName = "name=";
  Header header{.forward_only = false};
  std::string_view rest = line.substr(kHeader.size());
  while (!rest.empty()) {
    const std::string_view field = take_until(' ', rest);
    if (field.starts_with(kName)) header.name = field.substr(kName.size());
    if (const auto number = number_of(field, "num_ranks=")) header.num_ranks = number;
    if (const auto number = number_of(field, "num_stages=")) header.num_stages = number;
    if (const auto number = number_of(field, "num_chains=")) header.num_chains = *number;
    if (const auto number = number_of(field, "num_microbatches=")) {
      header.num_microbatches = number;
    }
    if (const auto number = number_of(field, "forward_only=")) header.forward_only = *number != 0;
  }
  return header;
}

// A file that was cut short may still hold a schedule, but of another pipeline.
void require_announced(std::string_view what, std::optional<int> announced, int64_t found) {
  MC_REQUIRE(!announced || *announced == found, "the header announces {} {}, but the rows hold {}",
             announced.value_or(0), what, found);
}

// The cells behind "rank 3:"; the number must be the expected one.
std::string_view cells_of_line(std::string_view line, int64_t line_number, int64_t rank) {
  const std::string prefix = format_text("rank {}:", rank);
  MC_REQUIRE(line.starts_with(prefix), "line {}: '{}' should start with '{}'", line_number,
             line.substr(0, 40), prefix);
  return line.substr(prefix.size());
}

// Appends the cells of one rank; `overlap` walks over schedule.overlaps, rank after rank.
template <typename Separate>
void append_cells(const Schedule& schedule,
                  int rank,
                  std::vector<int64_t>::const_iterator& overlap,
                  const Separate& separate,
                  std::string& text) {
  const auto actions = schedule.rank_actions(rank);
  const int64_t begin = schedule.offsets[static_cast<size_t>(rank)];
  for (size_t i = 0; i < actions.size(); ++i) {
    separate(i);
    const bool pair = overlap != schedule.overlaps.end() && i + 1 < actions.size() &&
                      *overlap == begin + static_cast<int64_t>(i);
    if (pair) text += '(';
    append_text(actions[i], text);
    if (!pair) continue;
    text += ';';
    append_text(actions[++i], text);
    text += kPairEnd;
    ++overlap;
  }
}

}  // namespace

std::string to_text(const Schedule& schedule) {
  std::string text = format_text("{} name={} num_ranks={} num_stages={} num_microbatches={}",
                                 kHeader, schedule.name, schedule.num_ranks(),
                                 schedule.num_stages(), schedule.num_microbatches);
  const int num_chains = schedule.placement.num_chains();
  if (num_chains > 1) text += format_text(" num_chains={}", num_chains);
  if (schedule.forward_only) text += " forward_only=1";
  text += '\n';
  text.reserve(text.size() + schedule.actions.size() * 8);
  auto overlap = schedule.overlaps.begin();
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    text += format_text("rank {}:", rank);
    append_cells(schedule, rank, overlap, [&](size_t) { text += ' '; }, text);
    text += '\n';
  }
  return text;
}

Schedule schedule_from_text(std::string_view text) {
  RowReader reader;
  Header header;
  int64_t line_number = 0;
  int64_t rank = 0;
  while (!text.empty()) {
    const std::string_view line = strip(take_until('\n', text));
    ++line_number;
    if (line.empty()) continue;
    if (line.starts_with('#')) {
      MC_REQUIRE(rank == 0, "line {}: the header stands after a rank", line_number);
      header = parse_header(line);
      continue;
    }
    std::string_view cells = cells_of_line(line, line_number, rank);
    const auto where = [&] { return format_text("line {}", line_number); };
    reader.begin_row();
    while (!cells.empty()) {
      const std::string_view cell = take_until(' ', cells);
      if (!cell.empty()) reader.add(cell, where);
    }
    ++rank;
  }
  require_announced("ranks", header.num_ranks, rank);
  Schedule schedule = std::move(reader).finish(std::move(header.name), header.num_chains);
  require_announced("stages", header.num_stages, schedule.num_stages());
  schedule.num_microbatches = header.num_microbatches.value_or(schedule.num_microbatches);
  schedule.forward_only = header.forward_only.value_or(schedule.forward_only);
  return schedule;
}

std::string to_csv(const Schedule& schedule) {
  MC_REQUIRE(schedule.placement.num_chains() == 1,
             "schedule '{}' has {} chains of stages; PyTorch's CSV knows one. Use the text form",
             schedule.name, schedule.placement.num_chains());
  std::string text;
  text.reserve(schedule.actions.size() * 8);
  auto overlap = schedule.overlaps.begin();
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto separate = [&](size_t i) {
      if (i > 0) text += ',';
    };
    append_cells(schedule, rank, overlap, separate, text);
    text += "\r\n";
  }
  return text;
}

Schedule schedule_from_csv(std::string_view text, std::string_view name) {
  RowReader reader;
  int64_t row = 0;
  while (!text.empty()) {
    std::string_view cells = strip(take_until('\n', text));
    if (cells.empty()) continue;
    ++row;
    int64_t column = 0;
    const auto where = [&] { return format_text("row {}, column {}", row, column); };
    reader.begin_row();
    while (!cells.empty()) {
      const std::string_view cell = strip(take_until(',', cells));
      ++column;
      if (!cell.empty()) reader.add(cell, where);
    }
  }
  return std::move(reader).finish(std::string(name), 1);
}

}  // namespace megacore::pipeline
