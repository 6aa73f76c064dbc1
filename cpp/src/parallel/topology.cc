#include "megacore/parallel/topology.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "megacore/base/check.h"

namespace megacore::parallel {
namespace {

using base::format_text;

constexpr int64_t kMaxWorldSize = std::numeric_limits<int32_t>::max();

int64_t etp_of(const TopologyConfig& config) { return config.etp.value_or(config.tp); }

// The factors that must divide the world; what is left over is dp or edp.
std::vector<AxisSize> dense_factors(const TopologyConfig& config) {
  return {{"tp", config.tp}, {"cp", config.cp}, {"pp", config.pp}};
}

std::vector<AxisSize> expert_factors(const TopologyConfig& config) {
  return {{"etp", etp_of(config)}, {"ep", config.ep}, {"pp", config.pp}};
}

// All axes of a view, fastest first. REQUIRES: the factors divide the world.
std::vector<AxisSize> view_layout(std::vector<AxisSize> factors,
                                  const std::string& rest,
                                  const TopologyConfig& config) {
  const int64_t left = config.world_size / product(factors);
  factors.push_back({rest, left});
  return arrange(factors, config.order);
}

std::vector<AxisSize> axes_before_pp(std::span<const AxisSize> layout) {
  const auto pp = std::ranges::find(layout, "pp", &AxisSize::axis);
  std::vector<AxisSize> result;
  for (const AxisSize& entry : layout.first(static_cast<size_t>(pp - layout.begin()))) {
    if (entry.size > 1) {
      result.push_back(entry);
    }
  }
  return result;
}

// Pipeline groups are {first, first + stride, ...}: they agree when the strides do.
bool same_pipeline_groups(const TopologyConfig& config,
                          std::span<const AxisSize> dense,
                          std::span<const AxisSize> expert) {
  return config.pp == 1 || product(axes_before_pp(dense)) == product(axes_before_pp(expert));
}

bool is_legal(const TopologyConfig& config) {
  if (config.world_size < 1 || config.world_size > kMaxWorldSize) {
    return false;
  }
  const std::vector<AxisSize> dense = dense_factors(config);
  const std::vector<AxisSize> expert = expert_factors(config);
  for (const std::vector<AxisSize>& factors : {dense, expert}) {
    int64_t left = config.world_size;  // dividing step by step cannot overflow
    for (const AxisSize& factor : factors) {
      if (factor.size < 1 || left % factor.size != 0) {
        return false;
      }
      left /= factor.size;
    }
  }
  try {
    return same_pipeline_groups(config, view_layout(dense, "dp", config),
                                view_layout(expert, "edp", config));
  } catch (const std::invalid_argument&) {
    return false;  // an axis became larger than 1 that the order does not name
  }
}

std::vector<int64_t> divisors(int64_t value) {
  std::vector<int64_t> result;
  for (int64_t d = 1; d <= value / d; ++d) {
    if (value % d == 0) {
      result.push_back(d);
      if (d != value / d) {
        result.push_back(value / d);
      }
    }
  }
  return result;
}

// Appends "name 4" or "name 2 or 4" for the legal values nearest to the present one, if any.
void add_nearest(std::vector<std::string>& out,
                 std::string_view name,
                 int64_t present,
                 std::vector<int64_t> candidates) {
  if (candidates.empty()) {
    return;
  }
  const auto distance = [present](int64_t value) { return std::abs(value - present); };
  std::ranges::sort(candidates);
  const int64_t best = distance(*std::ranges::min_element(candidates, {}, distance));
  std::string text(name);
  std::string_view separator = " ";
  for (const int64_t value : candidates) {
    if (distance(value) == best) {
      text += format_text("{}{}", separator, value);
      separator = " or ";
    }
  }
  out.push_back(text);
}

// The multiples of lcm(dense product, expert product) next below and above the present world size.
std::vector<std::string> nearest_worlds(const TopologyConfig& config) {
  const int64_t dense = product(dense_factors(config));
  const int64_t expert = product(expert_factors(config));
  if (dense > kMaxWorldSize || expert > kMaxWorldSize) {
    return {};
  }
  const int64_t step = dense / std::gcd(dense, expert) * expert;
  const int64_t below = config.world_size / step * step;
  std::vector<std::string> found;
  for (const int64_t world : {below, below + step}) {
    TopologyConfig changed = config;
    changed.world_size = world;
    if (world != config.world_size && is_legal(changed)) {
      found.push_back(std::to_string(world));
    }
  }
  if (found.empty()) {
    return {};
  }
  return {"world_size " + found.front() + (found.size() == 2 ? " or " + found.back() : "")};
}

// "; nearest legal settings: world_size 8 or 16, or tp 1 or 3, or pp 3". Each changes one value.
std::string nearest_settings(const TopologyConfig& config) {
  std::vector<std::string> found = nearest_worlds(config);
  const std::vector<int64_t> sizes = divisors(config.world_size);
  const auto try_axis = [&](std::string_view name, int64_t present, auto set) {
    std::vector<int64_t> legal;
    for (const int64_t size : sizes) {
      TopologyConfig changed = config;
      set(changed, size);
      if (size != present && is_legal(changed)) {
        legal.push_back(size);
      }
    }
    add_nearest(found, name, present, std::move(legal));
  };
  try_axis("tp", config.tp, [](TopologyConfig& c, int64_t size) { c.tp = size; });
  try_axis("cp", config.cp, [](TopologyConfig& c, int64_t size) { c.cp = size; });
  try_axis("pp", config.pp, [](TopologyConfig& c, int64_t size) { c.pp = size; });
  try_axis("ep", config.ep, [](TopologyConfig& c, int64_t size) { c.ep = size; });
  try_axis("etp", etp_of(config), [](TopologyConfig& c, int64_t size) { c.etp = size; });
  std::string text;
  for (const std::string& setting : found) {
    text += (text.empty() ? "; nearest legal settings: " : ", or ") + setting;
  }
  return text;
}

void require_sizes(const TopologyConfig& config) {
  MC_REQUIRE(1 <= config.world_size && config.world_size <= kMaxWorldSize,
             "world_size must be between 1 and {}, got {}", kMaxWorldSize, config.world_size);
  const std::array<AxisSize, 5> sizes = {{{"tp", config.tp},
                                          {"cp", config.cp},
                                          {"pp", config.pp},
                                          {"ep", config.ep},
                                          {"etp", etp_of(config)}}};
  for (const AxisSize& entry : sizes) {
    MC_REQUIRE(entry.size >= 1, "{} is {}; an axis size must be at least 1", entry.axis,
               entry.size);
  }
}

void require_divisible(const TopologyConfig& config,
                       std::span<const AxisSize> factors,
                       std::string_view view) {
  const bool etp_from_tp = factors.front().axis == "etp" && !config.etp.has_value();
  MC_REQUIRE(config.world_size % product(factors) == 0,
             "world_size {} is not divisible by {} ({} layers{}){}", config.world_size,
             product_text(factors), view, etp_from_tp ? "; etp defaults to tp" : "",
             nearest_settings(config));
}

std::string factors_text(std::span<const AxisSize> factors) {
  return factors.empty() ? std::string("1") : product_text(factors);
}

void require_same_pipeline_groups(const TopologyConfig& config,
                                  std::span<const AxisSize> dense,
                                  std::span<const AxisSize> expert) {
  TopologyConfig pp_last = config;
  pp_last.order.clear();
  for (const std::string& axis : parse_order(config.order)) {
    pp_last.order += axis == "pp" ? "" : axis + "-";
  }
  pp_last.order += "pp";
  MC_REQUIRE(same_pipeline_groups(config, dense, expert),
             "order \"{}\" gives dense and expert layers different pipeline groups: stages are {} "
             "ranks apart in the dense view but {} in the expert view; put pp last (\"{}\"){}",
             config.order, factors_text(axes_before_pp(dense)),
             factors_text(axes_before_pp(expert)), pp_last.order, nearest_settings(config));
}

}  // namespace

Topology make_topology(const TopologyConfig& config) {
  require_sizes(config);
  parse_order(config.order);
  const std::vector<AxisSize> dense = dense_factors(config);
  const std::vector<AxisSize> expert = expert_factors(config);
  require_divisible(config, dense, "dense");
  require_divisible(config, expert, "expert");
  const std::vector<AxisSize> dense_layout = view_layout(dense, "dp", config);
  const std::vector<AxisSize> expert_layout = view_layout(expert, "edp", config);
  require_same_pipeline_groups(config, dense_layout, expert_layout);
  return {.config = config,
          .dp = config.world_size / product(dense),
          .etp = etp_of(config),
          .expert_dp = config.world_size / product(expert),
          .dense = RankGenerator(dense_layout),
          .expert = RankGenerator(expert_layout)};
}

}  // namespace megacore::parallel
