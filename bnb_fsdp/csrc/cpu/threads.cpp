#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace bnb_fsdp {
namespace {

class Pool {
 public:
  void run(int threads, const std::function<void()>& job) {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      grow(threads - 1);
      job_ = &job;
      wanted_ = running_ = std::min(threads - 1, started_);
      ++round_;
    }
    wake_.notify_all();
    job();
    std::unique_lock<std::mutex> lock(mutex_);
    // Late sleepers find nothing left to do: take the job off them instead of waiting for them to wake.
    running_ -= wanted_;
    wanted_ = 0;
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

 private:
  void grow(int count) {
    try {
      for (; started_ < count; ++started_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those that exist, and the caller, do the work.
    }
  }

  void work() {
    unsigned long seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen && wanted_ > 0; });
      seen = round_;
      --wanted_;
      const std::function<void()>& job = *job_;
      lock.unlock();
      job();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void()>* job_ = nullptr;
  int started_ = 0, wanted_ = 0, running_ = 0;
  unsigned long round_ = 0;
};

// Never destroyed: its threads sleep until the process ends, and a forked child has the object but not the
// threads.
Pool* pool = nullptr;

void forget_pool() { pool = nullptr; }

// torch's OpenMP team, if torch is in this process and built with GCC's runtime: its threads are awake after
// the backward pass, and for a while they spin, taking turns with any other thread of ours.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel openmp_team() {
  static const GompParallel found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

}  // namespace

void run_parallel(int threads, bool use_openmp, const std::function<void()>& job) {
  if (const GompParallel team = use_openmp ? openmp_team() : nullptr) {
    const auto call = [](void* data) { (*static_cast<const std::function<void()>*>(data))(); };
    team(call, const_cast<std::function<void()>*>(&job), static_cast<unsigned>(threads), 0);
    return;
  }
  static std::mutex creation;
  static const int registered = pthread_atfork([] { creation.lock(); }, [] { creation.unlock(); },
                                               [] {
                                                 creation.unlock();
                                                 forget_pool();
                                               });
  (void)registered;
  Pool* current;
  {
    std::lock_guard<std::mutex> lock(creation);
    if (pool == nullptr) pool = new Pool;
    current = pool;
  }
  current->run(threads, job);
}

}  // namespace bnb_fsdp
