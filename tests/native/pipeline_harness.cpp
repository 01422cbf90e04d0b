// csrc/cuda/pipeline.cpp on a runtime made up here, which executes what is queued in any order that CUDA
// allows: streams are queues, a wait holds its stream until the record that was the event's latest when it was
// queued, and copies and kernels run in pieces, between which other streams may get on. A seed chooses. The
// results must be those of a sequential program, for every seed; with one kind of wait left out they must not.
//
//   c++ -std=c++17 -I tests/native/fake_cuda -I bnb_fsdp/csrc tests/native/pipeline_harness.cpp
//       bnb_fsdp/csrc/cuda/pipeline.cpp -o harness
//   ./harness SEEDS [to_device | caller | to_host | followed | synchronize | other_buffers]     (what is left
//   out)
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "c_api.h"
#include "cuda/error.h"

// ---- The runtime ----

namespace {

struct Work {
  std::function<bool()> ready;  // may it start?
  std::function<bool()> piece;  // does some of it; true when that was the last
};

}  // namespace

struct FakeStream {
  std::deque<Work> queue;
};

struct FakeEvent {
  std::shared_ptr<bool> latest;  // of the last record queued: whether it was reached
};

namespace {

std::mt19937 generator;
std::vector<FakeStream*> streams;  // in the order in which they were made: to_device and to_host come first
std::vector<FakeEvent*> events;
std::string left_out;
int fail_in = -1;  // copies until one fails
bool has_batches = true;
size_t piece_bytes = 64;
const std::vector<std::vector<uint32_t>>* staging_buffers = nullptr;
int batches_in = 0, small_batches_out = 0;  // pieces

bool is_staged(const void* address) {
  const auto* number = static_cast<const uint32_t*>(address);
  return std::any_of(staging_buffers->begin(), staging_buffers->end(),
                     [number](const std::vector<uint32_t>& buffer) {
                       return number >= buffer.data() && number < buffer.data() + buffer.size();
                     });
}

int chosen(int below) { return static_cast<int>(generator() % static_cast<unsigned>(below)); }

// One piece of work of a stream that can get on; false if there is none.
bool advance() {
  std::vector<FakeStream*> possible;
  for (FakeStream* stream : streams)
    if (!stream->queue.empty() && stream->queue.front().ready()) possible.push_back(stream);
  if (possible.empty()) return false;
  FakeStream* stream = possible[static_cast<size_t>(chosen(static_cast<int>(possible.size())))];
  if (stream->queue.front().piece()) stream->queue.pop_front();
  return true;
}

// The device gets on for a while, or not at all: the host may be far ahead of it.
int laziness = 0;

void time_passes() {
  if (chosen(4) < laziness) return;
  for (int i = chosen(200); i > 0 && advance(); --i) {
  }
}

void queue(FakeStream* stream, std::function<bool()> piece, std::function<bool()> ready = [] { return true; }) {
  stream->queue.push_back({std::move(ready), std::move(piece)});
  time_passes();
}

bool drain(FakeStream* stream) {
  while (!stream->queue.empty())
    if (!advance()) return false;
  return true;
}

}  // namespace

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made up"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMadeUp"; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  streams.push_back(*stream = new FakeStream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!stream->queue.empty()) return cudaErrorInvalidValue;
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (left_out == "synchronize") return cudaSuccess;
  return drain(stream) ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  events.push_back(*event = new FakeEvent);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  events.erase(std::find(events.begin(), events.end(), event));
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto reached = std::make_shared<bool>(false);
  event->latest = reached;
  queue(stream, [reached] { return *reached = true; });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const size_t which = static_cast<size_t>(std::find(streams.begin(), streams.end(), stream) - streams.begin());
  const char* kind = which == 0 ? "to_device" : which == 1 ? "to_host" : "caller";
  const bool is_followed = event == events.back();  // the pipeline makes it last
  if (left_out == (is_followed ? "followed" : kind)) return cudaSuccess;
  const auto reached = event->latest;
  if (reached) queue(stream, [] { return true; }, [reached] { return *reached; });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (event->latest && !*event->latest)
    if (!advance()) return cudaErrorUnknown;
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0.25f, cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (fail_in >= 0 && fail_in-- == 0) return cudaErrorUnknown;
  auto done = std::make_shared<size_t>(0);
  queue(stream, [=] {
    const size_t size = std::min(piece_bytes, bytes - *done);
    memcpy(static_cast<char*>(to) + *done, static_cast<const char*>(from) + *done, size);
    return (*done += size) == bytes;
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (fail_in >= 0 && fail_in-- == 0) return cudaErrorUnknown;
  if (std::min(to_pitch, from_pitch) < width) return cudaErrorInvalidValue;
  auto row = std::make_shared<size_t>(0);
  queue(stream, [=] {
    memcpy(static_cast<char*>(to) + *row * to_pitch, static_cast<const char*>(from) + *row * from_pitch, width);
    return ++*row == height;
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first, size_t kinds,
                                 cudaStream_t stream) {
  if (!has_batches) return cudaErrorNotSupported;
  if (fail_in >= 0 && fail_in-- == 0) return cudaErrorUnknown;
  if (kinds != 1 || *first != 0 || attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream)
    return cudaErrorInvalidValue;
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  for (size_t i = 0; i < count; ++i) {
    const bool small = bytes[i] < BNB_FSDP_LEAST_IN_BATCH;
    if (small && is_staged(to[i])) return cudaErrorUnknown;  // the host might wait
    batches_in += is_staged(to[i]);
    small_batches_out += small;
  }
  auto left = std::make_shared<std::vector<Copy>>();  // the arrays are the caller's again afterwards
  for (size_t i = 0; i < count; ++i) left->push_back({to[i], from[i], bytes[i]});
  queue(stream, [left] {
    const auto next = left->begin() + chosen(static_cast<int>(left->size()));
    memcpy(next->to, next->from, next->bytes);
    left->erase(next);
    return left->empty();
  });
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaErrorUnknown; }
cudaError_t cudaHostUnregister(void*) { return cudaErrorUnknown; }

namespace bnb_fsdp {
static std::string message;
int fail(const std::string& text) { return message = text, 1; }
int fail(const std::string& what, cudaError_t error) { return fail(what + ": " + cudaGetErrorString(error)); }
}  // namespace bnb_fsdp

// ---- Buckets: a rule in which every stale, lost or doubled update shows ----

namespace {

struct Slot {
  uint32_t* state;
  uint32_t* parameter;
  int64_t numel;
  uint32_t steps = 0;
};

uint32_t next_state(uint32_t state, uint32_t gradient, uint32_t step) {
  return state * 2654435761u + gradient * 40503u + step;
}

}  // namespace

struct bnb_fsdp_cuda_bucket {
  std::vector<Slot> slots;
};

int bnb_fsdp_cuda_bucket_step(bnb_fsdp_cuda_bucket* bucket, void*, const void* const* gradients,
                              const bnb_fsdp_hyper*, const float* const*, const float*, void* stream) {
  for (size_t i = 0; i < bucket->slots.size(); ++i) {
    if (gradients[i] == nullptr) continue;
    Slot& slot = bucket->slots[i];
    const auto* gradient = static_cast<const uint32_t*>(gradients[i]);
    const uint32_t step = ++slot.steps;
    auto at = std::make_shared<int64_t>(0);
    queue(static_cast<FakeStream*>(stream), [=] {
      const int64_t end = std::min(slot.numel, *at + 16);
      for (; *at < end; ++*at) {
        slot.state[*at] = next_state(slot.state[*at], gradient[*at], step);
        slot.parameter[*at] ^= slot.state[*at];
      }
      return *at == slot.numel;
    });
  }
  return 0;
}

// ---- The test ----

namespace {

using Numbers = std::vector<uint32_t>;

struct Tensor {
  uint32_t* state = nullptr;
  Numbers parameter, expected_state, expected_parameter;
  uint32_t steps = 0;
  std::vector<Numbers> gradients;  // of each step; empty if there is none

  size_t numel() const { return parameter.size(); }
  bool is_right() const { return std::equal(state, state + numel(), expected_state.begin()); }
};

// Tensors, many as large as the one before, with their states in one piece of memory, some numbers apart.
struct Host {
  std::vector<Tensor> tensors;
  Numbers memory;
  size_t gap;

  Host(int count, int64_t most) : tensors(static_cast<size_t>(count)), gap(static_cast<size_t>(chosen(5))) {
    std::vector<size_t> offsets;
    size_t end = 0, numel = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (i == 0 || chosen(2)) numel = static_cast<size_t>(1 + chosen(static_cast<int>(most)));
      for (size_t k = 0; k < numel; ++k) tensors[i].parameter.push_back(generator());
      offsets.push_back(end);
      end += numel + gap;
    }
    for (size_t k = 0; k < end; ++k) memory.push_back(generator());
    for (size_t i = 0; i < tensors.size(); ++i) {
      Tensor& t = tensors[i];
      t.state = memory.data() + offsets[i];
      t.expected_state.assign(t.state, t.state + t.numel());
      t.expected_parameter = t.parameter;
      t.gradients.reserve(8);
    }
  }
};

constexpr int64_t kRoom = 96;  // numbers in a staging buffer
constexpr int64_t kBuffers = 3;

// Chunks of a few tensors each, in buffers that take turns.
struct Plan {
  std::vector<std::unique_ptr<bnb_fsdp_cuda_bucket>> buckets;
  std::vector<bnb_fsdp_cuda_copy> copies;
  std::vector<bnb_fsdp_cuda_chunk> chunks;

  Plan(std::vector<Tensor>& tensors, std::vector<Numbers>& staging, int64_t& turn) {
    const int64_t apart = chosen(2);  // numbers between two states in a staging buffer
    int64_t used = kRoom;
    for (size_t i = 0; i < tensors.size(); ++i) {
      Tensor& t = tensors[i];
      const auto numel = static_cast<int64_t>(t.numel());
      if (used + numel > kRoom || chosen(4) == 0) {
        buckets.push_back(std::make_unique<bnb_fsdp_cuda_bucket>());
        turn = (turn + 1) % kBuffers;
        chunks.push_back({buckets.back().get(), nullptr, turn, static_cast<int64_t>(copies.size()), 0,
                          static_cast<int64_t>(i), 0});
        used = 0;
      }
      uint32_t* device = staging[static_cast<size_t>(chunks.back().buffer)].data() + used;
      bnb_fsdp_cuda_copy* last = chunks.back().copies == 0 ? nullptr : &copies.back();
      const int64_t host_pitch = i == 0 ? 0 : (t.state - tensors[i - 1].state) * 4;
      const int64_t device_pitch = last == nullptr ? 0 : (numel + apart) * 4;
      if (last != nullptr && last->bytes == numel * 4 && apart == 1 && chosen(4) != 0) {
        ++last->rows;  // one more of its kind: an odd number apart on the device, `gap` numbers in host memory
        last->host_pitch = host_pitch;
        last->device_pitch = device_pitch;
      } else {
        copies.push_back({t.state, device, numel * 4, 1, 0, 0});
        ++chunks.back().copies;
      }
      buckets.back()->slots.push_back({device, t.parameter.data(), numel, t.steps});
      ++chunks.back().gradients;
      used += numel + apart;
    }
  }

  bool begin(bnb_fsdp_cuda_pipeline* pipeline, int64_t ticket) const {
    const auto most = std::min(static_cast<int64_t>(chunks.size()), kBuffers);
    const int64_t count = 1 + chosen(static_cast<int>(most));
    return bnb_fsdp_cuda_pipeline_begin(pipeline, chunks.data(), count, copies.data(), ticket) == 0;
  }

  bool step(bnb_fsdp_cuda_pipeline* pipeline, const std::vector<const void*>& gradients, int64_t ticket,
            FakeStream* stream) const {
    return bnb_fsdp_cuda_pipeline_step(pipeline, chunks.data(), static_cast<int64_t>(chunks.size()),
                                       copies.data(), gradients.data(), nullptr, nullptr, ticket, stream) == 0;
  }
};

// Whether everything was as a sequential program has it.
bool run(unsigned seed) {
  generator.seed(seed);
  laziness = chosen(4);
  has_batches = chosen(3) != 0;
  piece_bytes = static_cast<size_t>(4 << chosen(6));
  FakeStream callers[2];
  bnb_fsdp_cuda_pipeline* pipeline = nullptr;
  if (bnb_fsdp_cuda_pipeline_create(0, kBuffers, &pipeline) != 0) return false;
  for (FakeStream& stream : callers) streams.push_back(&stream);
  FakeEvent changed;

  Host host(1 + chosen(12), chosen(2) ? kRoom : kRoom / 6);
  std::vector<Tensor>& tensors = host.tensors;
  std::vector<Numbers> staging(kBuffers, Numbers(kRoom));
  staging_buffers = &staging;
  std::vector<Numbers*> used;
  FakeStream* stream = &callers[0];

  // The staging buffers' memory is still in use by what was queued before.
  for (Numbers& buffer : staging)
    queue(stream, [&buffer, at = std::make_shared<size_t>(0)] {
      buffer[*at] = 0xA5A5A5A5u;
      return ++*at == buffer.size();
    });
  bool good = bnb_fsdp_cuda_pipeline_follow(pipeline, stream) == 0;

  int64_t turn = 0;
  std::vector<std::unique_ptr<Plan>> plans;  // their tables are alive to the end
  plans.push_back(std::make_unique<Plan>(tensors, staging, turn));
  const auto host_is_right = [&] {
    for (const Tensor& t : tensors)
      if (!t.is_right()) return false;
    return true;
  };
  for (int step = 0; step < 6; ++step) {
    if (chosen(3) == 0) {  // another stream, which the caller puts in order
      FakeStream* other = &callers[stream == &callers[0]];
      const auto reached = std::make_shared<bool>(false);
      queue(stream, [reached] { return *reached = true; });
      queue(other, [] { return true; }, [reached] { return *reached; });
      stream = other;
    }
    if (chosen(4) == 0) {  // other chunks in other buffers, once host memory is up to date
      if (left_out != "other_buffers") good &= bnb_fsdp_cuda_pipeline_wait(pipeline) == 0 && host_is_right();
      for (size_t i = 0; i < tensors.size(); ++i) {
        tensors[i].steps = 0;
        for (const Numbers& g : tensors[i].gradients) tensors[i].steps += !g.empty();
      }
      plans.push_back(std::make_unique<Plan>(tensors, staging, turn));
    }
    std::vector<const void*> pointers;
    const int kind = chosen(3);
    const int only = chosen(static_cast<int>(tensors.size()));
    for (size_t i = 0; i < tensors.size(); ++i) {
      Tensor& t = tensors[i];
      t.gradients.emplace_back();
      if (kind == 0 || (kind == 1 && chosen(2)) || (kind == 2 && static_cast<int>(i) == only)) {
        uint32_t count = 1;
        for (const Numbers& g : t.gradients) count += !g.empty();
        for (size_t k = 0; k < t.numel(); ++k) {
          const uint32_t gradient = generator();
          t.gradients.back().push_back(gradient);
          t.expected_state[k] = next_state(t.expected_state[k], gradient, count);
          t.expected_parameter[k] ^= t.expected_state[k];
        }
      }
      pointers.push_back(t.gradients.back().empty() ? nullptr : t.gradients.back().data());
    }
    const Plan& plan = *plans.back();
    const auto ticket = static_cast<int64_t>(plans.size());
    if (chosen(2)) good &= plan.begin(pipeline, ticket);
    if (chosen(8) == 0) {  // the step is not taken, and the buffers are let go
      good &= bnb_fsdp_cuda_pipeline_wait(pipeline) == 0;
      for (Numbers& buffer : staging) std::fill(buffer.begin(), buffer.end(), 0x5A5A5A5Au);
      for (int i = 0; i < 1000; ++i) advance();
      for (const Numbers& buffer : staging)
        good &= std::count(buffer.begin(), buffer.end(), 0x5A5A5A5Au) == static_cast<int64_t>(buffer.size());
    }
    if (chosen(4) == 0 && plans.size() > 1) good &= plans[plans.size() - 2]->begin(pipeline, ticket - 1);
    good &= plan.step(pipeline, pointers, ticket, stream);
    if (chosen(4) == 0) good &= bnb_fsdp_cuda_pipeline_wait(pipeline) == 0 && host_is_right();
    if (chosen(4) == 0) {  // the caller's next work sees the parameters
      good &= drain(stream);
      for (const Tensor& t : tensors) good &= t.parameter == t.expected_parameter;
    }
  }
  good &= bnb_fsdp_cuda_pipeline_wait(pipeline) == 0 && host_is_right() && drain(stream);
  for (const Tensor& t : tensors) good &= t.parameter == t.expected_parameter;
  while (advance()) {
  }
  bnb_fsdp_cuda_pipeline_destroy(pipeline);
  for (FakeStream& caller : callers) streams.erase(std::find(streams.begin(), streams.end(), &caller));
  return good && events.empty() && streams.empty();
}

// Measuring leaves host memory as it was, and failures are told.
bool others() {
  generator.seed(7);
  bnb_fsdp_cuda_pipeline* pipeline = nullptr;
  if (bnb_fsdp_cuda_pipeline_create(0, 0, &pipeline) == 0) return false;
  if (bnb_fsdp_cuda_pipeline_create(0, kBuffers, &pipeline) != 0) return false;
  std::vector<char> host(1 << 16), device(1 << 16);
  for (char& c : host) c = static_cast<char>(generator());
  const std::vector<char> before = host;
  double results[4] = {0, 0, 0, -1};
  bool good = bnb_fsdp_cuda_pipeline_measure(pipeline, host.data(), device.data(), 1 << 16, results) == 0;
  for (int i = 0; i < 3; ++i) good &= results[i] > 0;
  good &= results[3] >= 0;
  good &= host == before;
  FakeStream caller;
  streams.push_back(&caller);
  Host tensor(1, 8);
  std::vector<Tensor>& tensors = tensor.tensors;
  std::vector<Numbers> staging(kBuffers, Numbers(kRoom));
  staging_buffers = &staging;
  int64_t turn = 0;
  const Plan plan(tensors, staging, turn);
  const std::vector<const void*> gradients = {tensors[0].parameter.data()};
  for (int at : {0, 1}) {
    fail_in = at;
    good &= !plan.step(pipeline, gradients, 1, &caller);
    good &= bnb_fsdp::message ==
            std::string(at == 0 ? "state from host memory" : "state to host memory") + ": made up";
  }
  // What failed to begin is brought in by the step.
  Host several(6, kRoom);
  const Plan more(several.tensors, staging, turn);
  std::vector<const void*> their;
  for (Tensor& t : several.tensors) {
    t.gradients.push_back(t.expected_state);
    their.push_back(t.gradients.back().data());
    for (size_t k = 0; k < t.numel(); ++k)
      t.expected_state[k] = next_state(t.expected_state[k], t.gradients.back()[k], 1);
  }
  fail_in = 1;
  has_batches = false;
  good &= bnb_fsdp_cuda_pipeline_begin(pipeline, more.chunks.data(),
                                       std::min<int64_t>(3, static_cast<int64_t>(more.chunks.size())),
                                       more.copies.data(), 9) != 0;
  fail_in = -1;
  for (Numbers& buffer : staging) std::fill(buffer.begin(), buffer.end(), 0u);
  good &= more.step(pipeline, their, 9, &caller) && bnb_fsdp_cuda_pipeline_wait(pipeline) == 0;
  for (const Tensor& t : several.tensors) good &= t.is_right();
  good &= bnb_fsdp_cuda_register(0, host.data(), 5) != 0;
  good &= bnb_fsdp::message.find("page-locking 5 bytes of host memory") == 0;
  while (advance()) {
  }
  bnb_fsdp_cuda_pipeline_destroy(pipeline);
  streams.clear();
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  const int seeds = count > 1 ? atoi(arguments[1]) : 100;
  left_out = count > 2 ? arguments[2] : "";
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) wrong += !run(static_cast<unsigned>(seed));
  const bool fine = !left_out.empty() || (others() && batches_in > 0 && small_batches_out > 0);
  printf("wrong %d of %d%s\n", wrong, seeds, fine ? "" : ", and the others");
  return 0;
}
