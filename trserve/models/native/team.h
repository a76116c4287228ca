// A team of threads that goes through a step together. Knows no model.
//
// A step has a few hundred phases of some microseconds, so a thread that waits for the others spins
// first, for a bounded number of rounds, and sleeps in the kernel then (futex). Between steps the
// helpers do the same: nothing spins while there is no step.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace trs {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A counter that threads wait for. Memory order: whatever happened before advance() is seen by
// whoever has waited for it; both the counter and the number of sleepers are sequentially
// consistent, so that either the sleeper sees the new count or the advancing thread the sleeper.
class Signal {
 public:
  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  void advance() {
    count_.fetch_add(1);
    if (sleepers_.load()) syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait_beyond(uint32_t seen, int spin) {
    for (int round = 0; round < spin; ++round) {
      if (count() != seen) return;
      pause_briefly();
    }
    sleepers_.fetch_add(1);
    while (count_.load() == seen) {
      syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1);
  }

 private:
  alignas(64) std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Team {
 public:
  Team(int threads, int spin) : threads_(threads), spin_(spin) {
    for (int index = 1; index < threads; ++index) helpers_.emplace_back([this, index] { help(index); });
  }

  ~Team() {
    job_ = nullptr;
    begun_.advance();
    for (std::thread& helper : helpers_) helper.join();
  }

  Team(const Team&) = delete;

  int threads() const { return threads_; }

  // Runs `job(context, index)` in every thread and returns when all have returned.
  void run(void (*job)(void*, int), void* context) {
    job_ = job;
    context_ = context;
    if (threads_ > 1) begun_.advance();
    job(context, 0);
    meet();
  }

  // Returns when every thread of the team has called it.
  void meet() {
    if (threads_ == 1) return;
    const uint32_t seen = met_.count();
    if (arrived_.fetch_add(1) + 1 == threads_) {
      arrived_.store(0);
      met_.advance();
    } else {
      met_.wait_beyond(seen, spin_);
    }
  }

 private:
  void help(int index) {
    for (uint32_t seen = 0;; ++seen) {
      begun_.wait_beyond(seen, spin_);
      if (job_ == nullptr) return;
      job_(context_, index);
      meet();
    }
  }

  const int threads_;
  const int spin_;
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  Signal begun_;
  Signal met_;
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<std::thread> helpers_;
};

// Hands out the tasks of one phase, in order, to whoever asks first: a thread that the kernel takes
// the core from holds up one task, not its half of the phase.
class Tasks {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace trs
