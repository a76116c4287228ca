// A team of threads that goes through the phases of a step together. Knows no model.
//
// A phase is a number of tasks, which threads take one by one; it is over when all its tasks are,
// not when all threads have come. So a helper that the kernel has taken the core from, or that has
// not woken up yet, holds nobody up unless it is in the middle of a task: the others do the rest,
// and it joins them in whatever phase they have reached.
//
// A step has a few hundred phases of some microseconds. Whoever waits for a phase to end spins
// first, for a bounded number of rounds, and then sleeps in the kernel (futex). Between steps the
// helpers do the same: nothing spins while there is no step.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
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

// A number that threads wait for. Memory order: what happened before an addition is seen by whoever
// has waited for its result. The number and the count of sleepers are sequentially consistent, so
// that either a sleeper sees the new number or the one who wakes sees the sleeper.
class Signal {
 public:
  int get() const { return value_.load(std::memory_order_acquire); }
  int get_ordered() const { return value_.load(); }
  void reset() { value_.store(0, std::memory_order_relaxed); }
  int add(int amount) { return value_.fetch_add(amount) + amount; }

  void wake() {
    if (sleepers_.load()) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Returns once `is_met(value)`; it must be met by a change that wake() follows.
  template <class Condition>
  void wait(int spin, Condition is_met) {
    for (int round = 0; round < spin; ++round) {
      if (is_met(get())) return;
      pause_briefly();
    }
    sleepers_.fetch_add(1);
    for (int seen; !is_met(seen = value_.load());) {
      syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1);
  }

 private:
  alignas(64) std::atomic<int> value_{0};
  std::atomic<int> sleepers_{0};
};

// The tasks of one phase.
struct Phase {
  alignas(64) std::atomic<int> next{0};
  Signal done;
};

class Team {
 public:
  // `phases` is the largest number of phases that a step has.
  Team(int threads, int spin, int phases)
      : threads_(threads), spin_(spin), num_phases_(phases), phases_(new Phase[phases]) {
    for (int index = 1; index < threads; ++index) helpers_.emplace_back([this, index] { help(index); });
  }

  ~Team() {
    job_ = nullptr;
    open();
    for (std::thread& helper : helpers_) helper.join();
  }

  Team(const Team&) = delete;

  int threads() const { return threads_; }

  // Runs `job(context, thread)` in this thread and in those helpers that come in time.
  void run(void (*job)(void*, int), void* context) {
    for (int i = 0; i < num_phases_; ++i) {
      phases_[i].next.store(0, std::memory_order_relaxed);
      phases_[i].done.reset();
    }
    job_ = job;
    context_ = context;
    if (threads_ > 1) open();
    job(context, 0);
    if (threads_ > 1) close();
  }

  // The phase number `phase` of a job: its tasks 0 to count - 1, and then the wait for all of them.
  template <class Task>
  void each(int phase, int count, Task task) {
    Phase& tasks = phases_[phase];
    for (int i; (i = tasks.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      task(i);
      if (tasks.done.add(1) == count) tasks.done.wake();
    }
    if (tasks.done.get() < count) tasks.done.wait(spin_, [count](int done) { return done >= count; });
  }

 private:
  // rounds_ is odd while a job may be entered. A helper counts itself in before it looks, and the
  // job's owner shuts the door before it looks who is inside: one of them sees the other (both
  // orders are sequentially consistent), so nobody is in a job whose memory is about to change.
  void open() {
    rounds_.add(1);
    rounds_.wake();
  }

  void close() {
    rounds_.add(1);
    inside_.wait(spin_, [](int inside) { return inside == 0; });
  }

  void help(int index) {
    for (int seen = 0;;) {
      rounds_.wait(spin_, [seen](int round) { return round != seen && (round & 1); });
      inside_.add(1);
      seen = rounds_.get_ordered();
      if (seen & 1) {
        if (job_ == nullptr) return;
        job_(context_, index);
      }
      if (inside_.add(-1) == 0) inside_.wake();
    }
  }

  const int threads_;
  const int spin_;
  const int num_phases_;
  std::unique_ptr<Phase[]> phases_;
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  Signal rounds_;
  Signal inside_;
  std::vector<std::thread> helpers_;
};

}  // namespace trs
