// A small pool of sleeping threads.
//
// Not OpenMP: torch carries its own OpenMP runtime, and a second one in the process would bring a second set of
// spinning threads. These threads sleep while idle, so ranks that share a machine do not disturb each other.
#pragma once
#include <functional>

namespace bnb_fsdp {

// Runs job() on the caller and on up to threads - 1 pool threads at the same time; returns when all have
// returned. Calls from several threads take turns. Safe after fork: a child starts a pool of its own.
void run_parallel(int threads, const std::function<void()>& job);

}  // namespace bnb_fsdp
