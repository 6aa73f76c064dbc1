// Fibers of one host thread: calls of a function, each with a stack of its own, that take turns.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace emulated {

// Calls of one function that run until all have returned.
class Fibers {
 public:
  // Calls body(0) to body(count - 1), each on its own fiber. They take turns in this order, or with
  // `reverse` in the opposite one.
  static void run(int count, bool reverse, const std::function<void(int)>& body) {
    Fibers fibers(count, reverse, body);
    running_ = &fibers;
    switch_to(fibers.caller_, fibers.all_.front());
    running_ = nullptr;
  }

  // Lets each other fiber that has not returned take a turn.
  static void yield() {
    Fibers& fibers = *running_;
    const size_t mine = fibers.current_;
    fibers.current_ = fibers.all_[mine].next;
    if (fibers.current_ != mine) {
      switch_to(fibers.all_[mine], fibers.all_[fibers.current_]);
    }
  }

 private:
  static constexpr size_t kStackBytes = size_t{256} << 10U;
  struct Fiber {
    ucontext_t start;
    jmp_buf registers;
    bool is_started = false;
    size_t previous, next;  // of a ring of those that have not returned
  };

  Fibers(int count, bool reverse, const std::function<void(int)>& body)
      : body_(body), reverse_(reverse), all_(static_cast<size_t>(count)) {
    while (stacks_.size() < all_.size()) {
      stacks_.emplace_back(new std::byte[kStackBytes]);  // not initialised: few pages are used
    }
    for (size_t i = 0; i < all_.size(); ++i) {
      all_[i].previous = (i + all_.size() - 1) % all_.size();
      all_[i].next = (i + 1) % all_.size();
      give_stack(all_[i].start, stacks_[i].get());
    }
  }

  static void give_stack(ucontext_t& context, std::byte* stack) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Fibers::call, 0);
  }

  static void call() {
    Fibers& fibers = *running_;
    const size_t index = fibers.current_, last = fibers.all_.size() - 1;
    fibers.body_(static_cast<int>(fibers.reverse_ ? last - index : index));
    Fiber& mine = fibers.all_[index];
    fibers.all_[mine.previous].next = mine.next;
    fibers.all_[mine.next].previous = mine.previous;
    fibers.current_ = mine.next;
    switch_to(mine, mine.next == index ? fibers.caller_ : fibers.all_[mine.next]);
    std::terminate();  // nobody switches to a fiber that has returned
  }

  static void switch_to(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
    swapcontext(&from.start, &to.start);  // AddressSanitizer follows it
#else
    // 15 times as fast as swapcontext, which calls the system.
    if (_setjmp(from.registers) == 0) {
      from.is_started = true;
      if (to.is_started) {
        _longjmp(to.registers, 1);
      }
      setcontext(&to.start);
    }
#endif
  }

  const std::function<void(int)>& body_;
  bool reverse_;
  std::vector<Fiber> all_;
  Fiber caller_;
  size_t current_ = 0;
  inline static thread_local Fibers* running_ = nullptr;
  inline static thread_local std::vector<std::unique_ptr<std::byte[]>> stacks_;
};

// A barrier of fibers.
class FiberBarrier {
 public:
  explicit FiberBarrier(int count) : count_(count) {}
  void arrive_and_wait() {
    const size_t phase = phase_;
    if (++num_arrived_ == count_) {
      num_arrived_ = 0;
      ++phase_;
    }
    while (phase_ == phase) {
      Fibers::yield();
    }
  }

 private:
  int count_;
  int num_arrived_ = 0;
  size_t phase_ = 0;
};

}  // namespace emulated
