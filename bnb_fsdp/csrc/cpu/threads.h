// Threads for one step: torch's OpenMP team where there is one, else a small pool of sleeping threads.
//
// No OpenMP of our own: a second runtime in the process would bring a second set of spinning threads. The
// pool's threads sleep while idle, so ranks that share a machine do not disturb each other.
#pragma once
#include <functional>

namespace bnb_fsdp {

// Runs job() on the caller and on up to threads - 1 others at the same time; returns when all have returned.
// Calls from several threads take turns. A forked child starts a pool of its own; it must not ask for the
// OpenMP team, which does not survive a fork.
void run_parallel(int threads, bool use_openmp, const std::function<void()>& job);

}  // namespace bnb_fsdp
