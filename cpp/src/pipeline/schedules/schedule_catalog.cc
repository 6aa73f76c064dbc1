#include "megacore/pipeline/schedules/schedule_catalog.h"

#include <array>
#include <string>

#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

using base::format_text;
using Request = ScheduleRequest;

PipelineShape plain(const Request& r) {
  return {.num_ranks = r.num_ranks, .num_microbatches = r.num_microbatches};
}

ChunkedShape chunked(const Request& r) {
  return {.num_ranks = r.num_ranks,
          .num_chunks = r.num_chunks.value_or(1),
          .num_microbatches = r.num_microbatches};
}

GroupedShape grouped(const Request& r) {
  return {.num_ranks = r.num_ranks,
          .num_chunks = r.num_chunks.value_or(1),
          .num_microbatches = r.num_microbatches,
          .group_size = r.group_size};
}

InterleavedShape interleaved(const Request& r) {
  InterleavedShape shape{.num_ranks = r.num_ranks,
                         .num_chunks = r.num_chunks.value_or(1),
                         .num_microbatches = r.num_microbatches,
                         .group_size = r.group_size};
  shape.warmup_multiplier = r.warmup_multiplier.value_or(shape.warmup_multiplier);
  shape.pairs = r.pairs;
  return shape;
}

constexpr std::string_view kGroups =
    "a group, and the last group, of at least num_ranks microbatches always works";
constexpr std::string_view kZeroBubble = "Qi et al., Zero Bubble, arXiv:2401.10241";
constexpr std::string_view kMemory = "Qi et al., Controllable Memory, arXiv:2405.15362";

constexpr std::array kCatalog = {
    ScheduleInfo{.name = "no_pipelining",
                 .summary = "one rank: every microbatch forward and backward in turn",
                 .source = "",
                 .constraints = "num_ranks is 1",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 0,
                 .splits_backward = false,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return no_pipelining(chunked(r)); }},
    ScheduleInfo{.name = "gpipe",
                 .summary = "all forwards, then all backwards",
                 .source = "Huang et al., GPipe, arXiv:1811.06965",
                 .constraints = "",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 1,
                 .splits_backward = false,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return gpipe(plain(r)); }},
    ScheduleInfo{.name = "1f1b",
                 .summary = "one forward, one backward: the bubble of gpipe, the memory of p",
                 .source = "Narayanan et al., arXiv:2104.04473",
                 .constraints = "",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 1,
                 .splits_backward = false,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .takes_pairs = true,
                 .generate = [](const Request& r) { return one_f_one_b(plain(r), r.pairs); }},
    ScheduleInfo{
        .name = "interleaved_1f1b",
        .summary = "several chunks per rank, depth first: the bubble divided by chunks",
        .source = "Narayanan et al., arXiv:2104.04473",
        .constraints = kGroups,
        .placement = PlacementKind::kLoop,
        .num_chunks = 0,
        .splits_backward = false,
        .takes_group_size = true,
        .takes_warmup_multiplier = true,
        .takes_pairs = true,
        .generate = [](const Request& r) { return interleaved_one_f_one_b(interleaved(r)); }},
    ScheduleInfo{.name = "looped_bfs",
                 .summary = "several chunks per rank, breadth first: few, large transfers in a row",
                 .source = "Lamy-Poirier, arXiv:2211.05953",
                 .constraints = "",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 0,
                 .splits_backward = false,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return looped_bfs(chunked(r)); }},
    ScheduleInfo{.name = "group_interleaved",
                 .summary = "interleaved with small groups: less memory for a larger bubble",
                 .source = "Wan et al., PipeOffload, arXiv:2503.01328",
                 .constraints = "group_size is at least half of num_ranks",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 0,
                 .splits_backward = true,
                 .takes_group_size = true,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return group_interleaved(grouped(r)); }},
    ScheduleInfo{.name = "zb_h1",
                 .summary = "1f1b with late weight gradients: a third of the bubble",
                 .source = kZeroBubble,
                 .constraints = "",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 1,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return zb_h1(plain(r)); }},
    ScheduleInfo{.name = "zb_h2",
                 .summary = "no wait within a rank, for twice the memory of 1f1b",
                 .source = kZeroBubble,
                 .constraints = "",
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 1,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return zb_h2(plain(r)); }},
    ScheduleInfo{.name = "interleaved_zb",
                 .summary = "interleaved with late weight gradients",
                 .source = kZeroBubble,
                 .constraints = kGroups,
                 .placement = PlacementKind::kLoop,
                 .num_chunks = 0,
                 .splits_backward = true,
                 .takes_group_size = true,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return interleaved_zero_bubble(grouped(r)); }},
    ScheduleInfo{.name = "zb_v",
                 .summary = "V placement: no wait within a rank, with the memory of 1f1b",
                 .source = kZeroBubble,
                 .constraints = "",
                 .placement = PlacementKind::kV,
                 .num_chunks = 2,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return zb_v(plain(r)); }},
    ScheduleInfo{.name = "v_half",
                 .summary = "V placement: half the memory of 1f1b",
                 .source = kMemory,
                 .constraints = "",
                 .placement = PlacementKind::kV,
                 .num_chunks = 2,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return v_half(plain(r)); }},
    ScheduleInfo{.name = "v_min",
                 .summary = "V placement: a third of the memory of 1f1b",
                 .source = kMemory,
                 .constraints = "",
                 .placement = PlacementKind::kV,
                 .num_chunks = 2,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return v_min(plain(r)); }},
    ScheduleInfo{.name = "1f1b_v",
                 .summary = "V placement, fused backward: two thirds of the memory of 1f1b",
                 .source = kMemory,
                 .constraints = "",
                 .placement = PlacementKind::kV,
                 .num_chunks = 2,
                 .splits_backward = false,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return one_f_one_b_v(plain(r)); }},
    ScheduleInfo{.name = "dualpipe_v",
                 .summary = "V placement: forwards overlap with backwards of the other stage",
                 .source = "DeepSeek-AI, github.com/deepseek-ai/DualPipe",
                 .constraints = "num_microbatches is at least 2 num_ranks",
                 .placement = PlacementKind::kV,
                 .num_chunks = 2,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return dualpipe_v(plain(r)); }},
    ScheduleInfo{.name = "dualpipe",
                 .summary = "two chains in opposite directions, parameters held twice",
                 .source = "DeepSeek-AI, arXiv:2412.19437",
                 .constraints = "num_ranks and num_microbatches are even, num_microbatches is at "
                                "least 2 num_ranks",
                 .placement = PlacementKind::kBidirectional,
                 .num_chunks = 2,
                 .splits_backward = true,
                 .takes_group_size = false,
                 .takes_warmup_multiplier = false,
                 .generate = [](const Request& r) { return dualpipe(plain(r)); }},
};

// Names of the schedules for which `has` holds: "gpipe, 1f1b".
template <typename Has>
std::string names_of(const Has& has) {
  std::string names;
  for (const ScheduleInfo& info : kCatalog) {
    if (!has(info)) continue;
    if (!names.empty()) names += ", ";
    names += info.name;
  }
  return names;
}

}  // namespace

std::span<const ScheduleInfo> schedule_catalog() { return kCatalog; }

const ScheduleInfo& find_schedule(std::string_view name) {
  for (const ScheduleInfo& info : kCatalog) {
    if (info.name == name) return info;
  }
  throw std::invalid_argument(format_text("unknown schedule '{}'; choose one of {}", name,
                                          names_of([](const ScheduleInfo&) { return true; })));
}

Schedule build_schedule(std::string_view name, const ScheduleRequest& request) {
  const ScheduleInfo& info = find_schedule(name);
  MC_REQUIRE(
      info.num_chunks == 0 || request.num_chunks.value_or(info.num_chunks) == info.num_chunks,
      "num_chunks is {}; use num_chunks {} with schedule '{}', or choose one of {}",
      *request.num_chunks, info.num_chunks, name,
      names_of([](const ScheduleInfo& other) { return other.num_chunks == 0; }));
  MC_REQUIRE(!request.group_size || info.takes_group_size,
             "group_size is {}, but schedule '{}' has no groups; leave it out, or choose one of {}",
             *request.group_size, name,
             names_of([](const ScheduleInfo& other) { return other.takes_group_size; }));
  MC_REQUIRE(
      !request.warmup_multiplier || info.takes_warmup_multiplier,
      "warmup_multiplier is {}, but schedule '{}' has a fixed warmup; leave it out, or choose {}",
      *request.warmup_multiplier, name,
      names_of([](const ScheduleInfo& other) { return other.takes_warmup_multiplier; }));
  MC_REQUIRE(request.pairs == Pairs::kNone || info.takes_pairs,
             "pairs are asked for, but schedule '{}' has no choice of them; leave them out, or "
             "choose one of {}",
             name, names_of([](const ScheduleInfo& other) { return other.takes_pairs; }));
  return info.generate(request);
}

}  // namespace megacore::pipeline
