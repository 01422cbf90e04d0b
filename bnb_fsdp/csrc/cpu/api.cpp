// The C functions of the CPU library: checks, choice of instruction set, distribution of work.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <vector>

#include "../c_api.h"
#include "../quantize/codebook.h"
#include "flush.h"
#include "kernels.h"
#include "threads.h"

namespace bnb_fsdp {
namespace {

thread_local std::string error_message;

int fail(const std::string& message) {
  error_message = message;
  return 1;
}

const InstructionSet* const all_sets[] = {
#if defined(BNB_FSDP_X86)
    &avx512vbmi_set, &avx512_set, &avx2_set,
#endif
#if defined(BNB_FSDP_NEON)
    &neon_set,
#endif
    &generic_set,
};

const InstructionSet* best_set() {
  for (const InstructionSet* set : all_sets)
    if (set->supported()) return set;
  return &generic_set;
}

std::atomic<const InstructionSet*> current_set{nullptr};

const InstructionSet& instruction_set() {
  const InstructionSet* set = current_set.load();
  if (set == nullptr) current_set.store(set = best_set());
  return *set;
}

// Work is dealt out in pieces: at least so many elements that a ticket is worth taking, and so many pieces a
// thread that the load balances. Larger is better, as a piece starts with nothing prefetched.
constexpr int64_t kSmallestPiece = 32 * kBlock, kPiecesPerThread = 8;
// Below this many elements waking another thread costs more than it saves.
constexpr int64_t kSerial = 4 * kSmallestPiece;

int64_t piece_size(int64_t elements, int threads) {
  if (threads <= 1) return INT64_MAX / 2;
  const int64_t even = elements / (threads * kPiecesPerThread);
  return std::max(kSmallestPiece, even - even % kBlock);
}

struct Work {
  int64_t piece;
  std::vector<ScalarBlock> scalars;
  std::vector<int64_t> indices;  // active tensors
  std::vector<int64_t> ends;     // running count of pieces
};

// A call's arguments, once they are known to be sound.
struct Call {
  Kernel kernel;
  const bnb_fsdp_tensor* tensors;
  const void* const* gradients;
  int gradient_dtype;
  int threads;
  bool use_openmp;
};

// each(range, piece) for all pieces, on several threads.
template <class Each>
void run(const Work& work, const Call& call, const Each& each) {
  std::atomic<int64_t> ticket{0};
  const int64_t total = work.ends.empty() ? 0 : work.ends.back();
  const int threads = call.threads;
  const bool use_openmp = call.use_openmp;
  const auto job = [&] {
    const FlushScope flush;
    size_t at = 0;
    for (int64_t piece; (piece = ticket.fetch_add(1, std::memory_order_relaxed)) < total;) {
      while (work.ends[at] <= piece) ++at;
      const int64_t index = work.indices[at];
      const int64_t begin = (piece - (at > 0 ? work.ends[at - 1] : 0)) * work.piece;
      const bnb_fsdp_tensor& tensor = call.tensors[index];
      const int64_t end = std::min(begin + work.piece, tensor.numel);
      each(Range{&tensor, call.gradients[index], &work.scalars[at], begin, end}, piece);
    }
  };
  if (threads > 1 && total > 1) {
    try {
      run_parallel(static_cast<int>(std::min<int64_t>(threads, total)), use_openmp, job);
    } catch (const std::exception&) {
      // No memory or threads to be had: the pieces that are left are done below.
    }
  }
  job();
}

// What is wrong with a table entry, or NULL.
const char* check(const bnb_fsdp_tensor& t, int bits, int states, int64_t groups) {
  if (t.numel < 0) return "numel is negative";
  if (t.group < 0 || t.group >= groups) return "its group is out of range";
  if (t.step == nullptr) return "it has no step counter";
  if (t.numel == 0) return nullptr;
  if (t.parameter == nullptr) return "it has no parameter";
  for (int s = 0; s < states; ++s)
    if (t.state[s] == nullptr || (bits == 8 && t.absmax[s] == nullptr)) return "its state is missing";
  return nullptr;
}

// Checks the arguments of a call and deals out the work, `piece` elements at a time (0: as suits the threads);
// 0, or the failure told. Nothing after it can fail.
int prepare(const char* rule, int bits, int parameter_dtype, int64_t count, int64_t groups, int64_t piece,
            Call& call, Work& work) {
  if (rule == nullptr || (bits != 8 && bits != 32))
    return fail("no kernel for " + std::to_string(bits) + " bits");
  if (call.gradient_dtype < BNB_FSDP_FLOAT32 || call.gradient_dtype > BNB_FSDP_FLOAT16)
    return fail("unknown gradient dtype " + std::to_string(call.gradient_dtype));
  call.kernel = instruction_set().find(rule, bits, parameter_dtype);
  if (call.kernel.run == nullptr)
    return fail("no kernel for rule " + std::string(rule) + ", parameter dtype " +
                std::to_string(parameter_dtype));
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (call.gradients[i] == nullptr) continue;
    if (const char* problem = check(call.tensors[i], bits, call.kernel.states, groups))
      return fail("tensor " + std::to_string(i) + ": " + problem);
    work.indices.push_back(i);
    elements += call.tensors[i].numel;
  }
  if (elements <= kSerial) call.threads = 1;
  work.piece = piece != 0 ? piece : piece_size(elements, call.threads);
  int64_t pieces = 0;
  for (const int64_t i : work.indices)
    work.ends.push_back(pieces += (call.tensors[i].numel + work.piece - 1) / work.piece);
  work.scalars.resize(work.indices.size());
  return 0;
}

}  // namespace
}  // namespace bnb_fsdp

using namespace bnb_fsdp;

extern "C" {

const char* bnb_fsdp_last_error(void) { return error_message.c_str(); }

int bnb_fsdp_abi_version(void) { return BNB_FSDP_ABI_VERSION; }

const char* bnb_fsdp_build_info(void) {
#if defined(__clang__)
  return "clang " __clang_version__ ", " BNB_FSDP_TARGET;
#else
  return "gcc " __VERSION__ ", " BNB_FSDP_TARGET;
#endif
}

int bnb_fsdp_codebook(int is_signed, float* values) {
  if (values == nullptr) return fail("codebook: values is NULL");
  memcpy(values, codebook(is_signed != 0).values, 256 * sizeof(float));
  return 0;
}

const char* bnb_fsdp_cpu_isa(void) { return instruction_set().name; }

const char* bnb_fsdp_cpu_isas(void) {
  static const std::string names = [] {
    std::string joined;
    for (const InstructionSet* set : all_sets)
      if (set->supported()) joined += (joined.empty() ? "" : ",") + std::string(set->name);
    return joined;
  }();
  return names.c_str();
}

int bnb_fsdp_cpu_set_isa(const char* name) {
  for (const InstructionSet* set : all_sets)
    if (name != nullptr && strcmp(set->name, name) == 0 && set->supported()) {
      current_set.store(set);
      return 0;
    }
  return fail("instruction set " + std::string(name ? name : "(null)") + " is not available; choose one of " +
              bnb_fsdp_cpu_isas());
}

int bnb_fsdp_cpu_step(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                      const bnb_fsdp_tensor* tensors, const void* const* gradients, int64_t count,
                      const bnb_fsdp_hyper* hypers, int64_t groups, const float* scales, int threads,
                      int use_openmp) {
  try {
    Call call{{}, tensors, gradients, gradient_dtype, threads, use_openmp != 0};
    Work work;
    if (prepare(rule, bits, parameter_dtype, count, groups, 0, call, work) != 0) return 1;
    const FlushScope flush;
    for (size_t at = 0; at < work.indices.size(); ++at) {
      const bnb_fsdp_tensor& t = tensors[work.indices[at]];
      *t.step += 1.0f;
      call.kernel.scalars(hypers[t.group], *t.step, scales ? scales[work.indices[at]] : 1.0f, work.scalars[at]);
    }
    run(work, call, [&](const Range& range, int64_t) { call.kernel.run(range, gradient_dtype); });
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cpu_norms(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                       const bnb_fsdp_tensor* tensors, const void* const* gradients, int64_t count,
                       const bnb_fsdp_hyper* hypers, int64_t groups, float* sums, int threads, int use_openmp) {
  try {
    Call call{{}, tensors, gradients, gradient_dtype, threads, use_openmp != 0};
    Work work;
    if (prepare(rule, bits, parameter_dtype, count, groups, kSmallestPiece, call, work) != 0) return 1;
    if (call.kernel.norms == nullptr) return fail(std::string(rule) + " has no update norm");
    struct Sums {
      double values[2] = {0.0, 0.0};
    };
    std::vector<Sums> pieces(static_cast<size_t>(work.ends.empty() ? 0 : work.ends.back()));
    const FlushScope flush;
    for (size_t at = 0; at < work.indices.size(); ++at) {
      const bnb_fsdp_tensor& t = tensors[work.indices[at]];
      call.kernel.scalars(hypers[t.group], *t.step + 1.0f, 1.0f, work.scalars[at]);
    }
    run(work, call, [&](const Range& range, int64_t piece) {
      call.kernel.norms(range, gradient_dtype, pieces[static_cast<size_t>(piece)].values);
    });
    std::fill(sums, sums + 2 * count, 0.0f);
    int64_t piece = 0;
    for (size_t at = 0; at < work.indices.size(); ++at) {
      Sums total;
      for (; piece < work.ends[at]; ++piece)
        for (int which = 0; which < 2; ++which)
          total.values[which] += pieces[static_cast<size_t>(piece)].values[which];
      for (int which = 0; which < 2; ++which)
        sums[2 * work.indices[at] + which] = static_cast<float>(total.values[which]);
    }
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

}  // extern "C"
