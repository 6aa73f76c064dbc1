#include "search/order_search.h"

#include <algorithm>
#include <utility>

#include "search/random.h"

namespace megacore::pipeline {
namespace {

// Indices of the tokens that start when the token before them on their rank ends: where the rank
// itself holds them back.
class CriticalPath {
 public:
  explicit CriticalPath(const Instance& instance)
      : instance_(instance),
        counts_(static_cast<size_t>(instance.num_stages()) * 3),
        index_(static_cast<size_t>(instance.num_stages()) *
               static_cast<size_t>(instance.num_microbatches) * 3) {}

  // Of orders with these starts, one path from the end to the beginning.
  const std::vector<size_t>& find(const Orders& orders, const std::vector<double>& starts) {
    number(orders);
    const auto end = [&](size_t i) { return starts[i] + instance_.duration(orders.tokens[i]); };
    size_t here = 0;
    for (size_t rank = 0; rank + 1 < orders.offsets.size(); ++rank) {
      const size_t last = orders.offsets[rank + 1] - 1;
      if (rank == 0 || end(last) > end(here)) here = last;
    }
    path_.clear();
    while (starts[here] > kSameTime) {
      const bool is_first = std::binary_search(orders.offsets.begin(), orders.offsets.end(), here);
      if (!is_first && end(here - 1) >= starts[here] - kSameTime) {
        path_.push_back(here);
        --here;
        continue;
      }
      here = input_of(orders.tokens[here], microbatch_[here], starts[here], end);
    }
    return path_;
  }

 private:
  size_t at(int stage, Part part, int microbatch) const {
    return instance_.at(stage, microbatch) * 3 + static_cast<size_t>(part);
  }

  void number(const Orders& orders) {
    std::fill(counts_.begin(), counts_.end(), 0);
    microbatch_.resize(orders.tokens.size());
    for (size_t i = 0; i < orders.tokens.size(); ++i) {
      const Token& token = orders.tokens[i];
      const int microbatch =
          counts_[static_cast<size_t>(token.stage) * 3 + static_cast<size_t>(token.part)]++;
      microbatch_[i] = microbatch;
      index_[at(token.stage, token.part, microbatch)] = i;
    }
  }

  // The input that arrives as the action starts.
  size_t input_of(const Token& token, int microbatch, double start, const auto& end) const {
    if (token.part == Part::kWeight) return index_[at(token.stage, Part::kBackward, microbatch)];
    if (token.part == Part::kForward)
      return index_[at(token.stage - 1, Part::kForward, microbatch)];
    if (token.stage + 1 < instance_.num_stages()) {
      const size_t next = index_[at(token.stage + 1, Part::kBackward, microbatch)];
      const double hop = instance_.hop[static_cast<size_t>(token.stage) + 1];
      if (end(next) + hop >= start - kSameTime) return next;
    }
    return index_[at(token.stage, Part::kForward, microbatch)];
  }

  const Instance& instance_;
  std::vector<int> counts_;
  std::vector<int> microbatch_;
  std::vector<size_t> index_;
  std::vector<size_t> path_;
};

class OrderClimb {
 public:
  OrderClimb(OrderTimer& timer, const Instance& instance, Orders orders, const OrderSearch& search)
      : timer_(timer),
        instance_(instance),
        search_(search),
        critical_(instance),
        random_(search.seed),
        found_{std::move(orders), kNever, 0} {}

  FoundOrders run() && {
    found_.makespan = time(found_.orders);
    path_ = critical_.find(found_.orders, timer_.starts());
    const auto cost = static_cast<int64_t>(instance_.num_actions());
    Orders other = found_.orders;
    while (found_.makespan > search_.target + kSameTime && !path_.empty() &&
           found_.num_scheduled + cost <= search_.max_actions) {
      if (!move(other)) {
        ++found_.num_scheduled;  // so that it ends
        continue;
      }
      const double makespan = time(other);
      if (makespan > found_.makespan + kSameTime) {
        restore(other);
        continue;
      }
      found_.makespan = makespan;
      restore_from(other);
      path_ = critical_.find(other, timer_.starts());
    }
    return std::move(found_);
  }

 private:
  double time(const Orders& orders) {
    found_.num_scheduled += static_cast<int64_t>(instance_.num_actions());
    return timer_.makespan(orders);
  }

  // Rotates one critical token to an earlier place, or what is before it to a later one.
  bool move(Orders& orders) {
    const size_t to = path_[random_.below(path_.size())];
    const auto rank = static_cast<size_t>(instance_.placement.rank_of(orders.tokens[to].stage));
    const size_t room = to - orders.offsets[rank];
    constexpr size_t kFarthest = 8;
    begin_ = to - 1 - random_.below(std::min(room, random_.coin() ? kFarthest : 1));
    end_ = to + 1;
    const auto first = orders.tokens.begin() + static_cast<std::ptrdiff_t>(begin_);
    const auto last = orders.tokens.begin() + static_cast<std::ptrdiff_t>(end_);
    if (random_.coin()) {
      std::rotate(first, last - 1, last);
    } else {
      std::rotate(first, first + 1, last);
    }
    if (is_legal(orders, rank)) return true;
    restore(orders);
    return false;
  }

  // Whether the rank keeps its memory limit and F before B before W.
  bool is_legal(const Orders& orders, size_t rank) {
    held_counts_.assign(static_cast<size_t>(instance_.num_stages()) * 3, 0);
    const Part release = instance_.split ? Part::kWeight : Part::kBackward;
    int64_t held = 0;
    for (size_t i = orders.offsets[rank]; i < end_; ++i) {
      const Token& token = orders.tokens[i];
      int* counts = &held_counts_[static_cast<size_t>(token.stage) * 3];
      const auto part = static_cast<size_t>(token.part);
      ++counts[part];
      if (part > 0 && counts[part] > counts[part - 1]) return false;
      const int64_t size = instance_.size[static_cast<size_t>(token.stage)];
      if (token.part == Part::kForward && (held += size) > instance_.limit[rank]) return false;
      if (token.part == release) held -= size;
    }
    return true;
  }

  void restore(Orders& orders) const { copy(found_.orders, orders); }
  void restore_from(const Orders& orders) { copy(orders, found_.orders); }
  void copy(const Orders& from, Orders& to) const {
    std::copy(from.tokens.begin() + static_cast<std::ptrdiff_t>(begin_),
              from.tokens.begin() + static_cast<std::ptrdiff_t>(end_),
              to.tokens.begin() + static_cast<std::ptrdiff_t>(begin_));
  }

  OrderTimer& timer_;
  const Instance& instance_;
  OrderSearch search_;
  CriticalPath critical_;
  Random random_;
  FoundOrders found_;
  std::vector<size_t> path_;  // of found_.orders
  std::vector<int> held_counts_;
  size_t begin_ = 0;  // the tokens that the last move touched
  size_t end_ = 0;
};

}  // namespace

FoundOrders search_orders(OrderTimer& timer,
                          const Instance& instance,
                          Orders orders,
                          const OrderSearch& search) {
  return OrderClimb(timer, instance, std::move(orders), search).run();
}

}  // namespace megacore::pipeline
