#include "gather.h"

#include <stddef.h>

#include <new>
#include <vector>

#include "dlpack_exchange.h"

namespace {

using bnb_fsdp::dlpack::DataType;
using bnb_fsdp::dlpack::ExchangeApi;
using bnb_fsdp::dlpack::Managed;
using bnb_fsdp::dlpack::Tensor;

constexpr size_t kAhead = 4;  // parameters between fetching what one needs into the cache and looking at it
constexpr int kEqual = 2;     // Py_EQ
constexpr DataType kDtypes[] = {{2, 32, 1}, {4, 16, 1}, {2, 16, 1}};

bool same(DataType a, DataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }
uint64_t address(const Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset; }

// Three numbers at most, usually: no call of memcmp.
bool same(const int64_t* planned, const int64_t* values, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    if (planned[i] != values[i]) return false;
  return true;
}

struct StateTensor {
  void* key;
  void* tensor;
};

// What was planned, in the order in which it is looked at: shapes, strides, state tensors and lines lie in
// vectors of their own, next to those of the next parameter.
struct Entry {
  void *parameter, *local, *values, *probed;
  uint64_t data, probed_data;
  bnb_fsdp::dlpack::Device device;
  DataType dtype, gradient_dtype;
  int64_t numel, slot;
  size_t shape, states, lines;  // where they begin; the strides follow the shape
  int32_t ndim, state_count, line_count;
  bool sharded;
};

// An owned reference.
class Reference {
 public:
  Reference(const bnb_fsdp_gather_host& host, void* object) : host_(host), object_(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() {
    if (object_) host_.release(object_);
  }
  void* get() const { return object_; }
  void* take() {
    void* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  const bnb_fsdp_gather_host& host_;
  void* object_;
};

class Table {
 public:
  Table(const bnb_fsdp_gather_host& host, int64_t groups)
      : host_(host), api_(*static_cast<const ExchangeApi*>(host.exchange_api)), groups_(groups) {}
  ~Table() {
    release();
    for (Managed* pin : pins_)
      if (pin->deleter) pin->deleter(pin);
  }

  bool add(const bnb_fsdp_gather_parameter& parameter);
  void order(const int64_t* indices, int64_t count) {
    order_.assign(indices, indices + count);
    held_.reserve(count);
  }
  int64_t gather(void* groups, void* state, uint64_t* pointers);
  void release();

 private:
  Reference attribute(void* object, void* name) const { return {host_, host_.get_attribute(object, name)}; }
  Reference property(void* object, const bnb_fsdp_gather_getter& getter) const {
    return {host_, getter.get(object, getter.closure)};
  }
  // Both borrowed, the second NULL where it was deleted.
  void* type_of(void* object) const { return at(object, host_.type); }
  static void* at(void* object, int64_t offset) {
    return *reinterpret_cast<void**>(static_cast<char*>(object) + offset);
  }
  bool is_negated(void* tensor) const {
    return Reference(host_, host_.is_negated(tensor, nullptr)).get() != host_.false_;
  }
  bool probe(void* object, Tensor* out) const { return api_.tensor_from_object(object, out) == 0; }
  void pin(void* tensor);
  bool failed() const {
    host_.clear_error();
    return false;
  }

  bool same_groups(void* groups) const;
  bool same_state(void* state) const;
  int look(const Entry& entry, uint64_t* pointers);
  bool fits(const Entry& entry, const Tensor& tensor, DataType dtype) const;
  bool has_strides(const Entry& entry, const Tensor& tensor) const;
  bool still_frozen(void* parameter) const;
  bool same_parameter(const Entry& entry) const;
  bool same_sharding(void* parameter, void* gradient) const;
  bool look_at_gradient(const Entry& entry, Reference gradient, uint64_t* pointer);

  const bnb_fsdp_gather_host host_;
  const ExchangeApi& api_;
  std::vector<std::vector<void*>> groups_;  // parameters by group
  std::vector<Entry> entries_;
  std::vector<int64_t> shapes_;
  std::vector<StateTensor> states_;
  std::vector<const void*> lines_;
  std::vector<int64_t> order_;
  std::vector<Managed*> pins_;
  std::vector<void*> held_;
};

// While a tensor has its Python object as only owner, each look at it moves the ownership to C++ and back (31
// of 48 ns in torch 2.13); with a second owner it does not. Not for parameters: torch.utils.swap_tensors()
// counts owners.
void Table::pin(void* tensor) {
  Managed* managed = nullptr;
  if (api_.managed_from_object && api_.managed_from_object(tensor, &managed) == 0 && managed)
    pins_.push_back(managed);
  else
    host_.clear_error();
}

bool Table::add(const bnb_fsdp_gather_parameter& parameter) {
  groups_[parameter.group].push_back(parameter.parameter);
  Entry entry{};
  entry.parameter = parameter.parameter;
  entry.values = parameter.values;
  if (entry.values) {
    entry.local = parameter.local;
    entry.sharded = parameter.sharded;
    entry.gradient_dtype = kDtypes[parameter.gradient_dtype];
    entry.slot = parameter.slot;
    Tensor tensor;
    if (!probe(parameter.probed, &tensor)) return failed();
    entry.probed = parameter.probed;
    entry.probed_data = address(tensor);
    pin(entry.probed);
    if (!probe(entry.local, &tensor)) return failed();
    if (entry.sharded) pin(entry.local);
    entry.data = address(tensor);
    entry.device = tensor.device;
    entry.dtype = tensor.dtype;
    entry.ndim = tensor.ndim;
    entry.shape = shapes_.size();
    shapes_.insert(shapes_.end(), tensor.shape, tensor.shape + tensor.ndim);
    shapes_.insert(shapes_.end(), tensor.strides, tensor.strides + tensor.ndim);
    entry.numel = 1;
    for (int32_t i = 0; i < tensor.ndim; ++i) entry.numel *= tensor.shape[i];
    entry.states = states_.size();
    entry.state_count = static_cast<int32_t>(parameter.count);
    for (int64_t i = 0; i < parameter.count; ++i) states_.push_back({parameter.keys[i], parameter.tensors[i]});
    entry.lines = lines_.size();
    entry.line_count = static_cast<int32_t>(parameter.line_count);
    lines_.insert(lines_.end(), parameter.lines, parameter.lines + parameter.line_count);
  }
  entries_.push_back(entry);
  return true;
}

bool Table::same_groups(void* groups) const {
  if (host_.list_size(groups) != static_cast<intptr_t>(groups_.size())) return false;
  for (size_t i = 0; i < groups_.size(); ++i) {
    void* group = host_.list_item(groups, i);
    void* params = group ? host_.dict_item(group, host_.params) : nullptr;
    const std::vector<void*>& planned = groups_[i];
    if (!params || host_.list_size(params) != static_cast<intptr_t>(planned.size())) return false;
    for (size_t j = 0; j < planned.size(); ++j)
      if (host_.list_item(params, j) != planned[j]) return false;
  }
  return true;
}

// Walks the dicts in their order, as looking a tensor up calls Tensor.__hash__, which is Python. Entries that
// were not planned are none of our business; another order of the planned ones is for Python to judge.
bool Table::same_state(void* state) const {
  intptr_t position = 0;
  void *key, *value;
  size_t found = 0;
  while (found < order_.size() && host_.dict_next(state, &position, &key, &value)) {
    const Entry& entry = entries_[order_[found]];
    if (key != entry.parameter) continue;
    if (value != entry.values) return false;
    const StateTensor* planned = states_.data() + entry.states;
    const StateTensor* end = planned + entry.state_count;
    intptr_t inner = 0;
    while (planned < end && host_.dict_next(entry.values, &inner, &key, &value)) {
      if (key != planned->key) continue;
      if (value != planned->tensor) return false;
      ++planned;
    }
    if (planned < end) return false;
    ++found;
  }
  return found == order_.size();
}

bool Table::fits(const Entry& entry, const Tensor& tensor, DataType dtype) const {
  return tensor.device.type == entry.device.type && tensor.device.index == entry.device.index &&
         same(tensor.dtype, dtype) && tensor.ndim == entry.ndim &&
         same(shapes_.data() + entry.shape, tensor.shape, entry.ndim);
}

bool Table::has_strides(const Entry& entry, const Tensor& tensor) const {
  // A dimension of one element has no order: its stride may be anything.
  const int64_t* shape = shapes_.data() + entry.shape;
  for (int32_t i = 0; i < entry.ndim; ++i)
    if (shape[i] != 1 && shape[entry.ndim + i] != tensor.strides[i]) return false;
  return true;
}

bool Table::still_frozen(void* parameter) const {
  return property(parameter, host_.gradient).get() == host_.none &&
         property(parameter, host_.requires_gradient).get() == host_.false_;
}

bool Table::same_parameter(const Entry& entry) const {
  void* local = entry.sharded ? at(entry.parameter, host_.local) : entry.local;
  if (local != entry.local && (!local || type_of(local) != host_.tensor_type)) return false;
  Tensor tensor;
  return probe(local, &tensor) && address(tensor) == entry.data && fits(entry, tensor, entry.dtype) &&
         has_strides(entry, tensor);
}

// FSDP2 gives a gradient the very spec object of its parameter; autograd makes one.
bool Table::same_sharding(void* parameter, void* gradient) const {
  if (type_of(gradient) != host_.sharded_type) return false;
  void* spec = at(parameter, host_.spec);
  if (spec && spec == at(gradient, host_.spec)) return true;
  for (void* name : host_.layout) {
    Reference first = attribute(parameter, name), second = attribute(gradient, name);
    if (!first.get() || !second.get()) return false;
    if (first.get() != second.get() && host_.compare(first.get(), second.get(), kEqual) != 1) return false;
  }
  return true;
}

bool Table::look_at_gradient(const Entry& entry, Reference gradient, uint64_t* pointer) {
  if (!gradient.get()) return false;
  if (gradient.get() == host_.none) {
    *pointer = 0;
    return true;
  }
  if (entry.sharded && !same_sharding(entry.parameter, gradient.get())) return false;
  void* local = entry.sharded ? at(gradient.get(), host_.local) : gradient.get();
  Tensor tensor;
  // Of an exact torch.Tensor, a sparse or otherwise unusual one cannot be described; a lazily negated one can.
  if (!local || type_of(local) != host_.tensor_type || !probe(local, &tensor)) return false;
  if (!fits(entry, tensor, entry.gradient_dtype)) return false;
  if (entry.numel > 0 && address(tensor) == 0) return false;  // freed, or lazy zeros
  // A lazily negated tensor is half of a conjugated complex one, with a gap after each element: the strides
  // tell, other than those of a parameter, which has none. Only the private torch._neg_view() makes one without
  // gaps. To ask each costs as much as all else about a gradient.
  if (entry.numel > 1 ? !has_strides(entry, tensor) : is_negated(local)) return false;
  *pointer = entry.numel > 0 ? address(tensor) : 1;
  held_.push_back(gradient.take());
  return true;
}

int Table::look(const Entry& entry, uint64_t* pointers) {
  if (!entry.values) return still_frozen(entry.parameter) ? 0 : BNB_FSDP_GATHER_FROZEN;
  if (!same_parameter(entry)) return BNB_FSDP_GATHER_PARAMETER;
  Tensor state;
  if (!probe(entry.probed, &state) || address(state) != entry.probed_data) return BNB_FSDP_GATHER_STORAGE;
  if (!look_at_gradient(entry, property(entry.parameter, host_.gradient), &pointers[entry.slot]))
    return BNB_FSDP_GATHER_GRADIENT;
  return 0;
}

int64_t Table::gather(void* groups, void* state, uint64_t* pointers) {
  release();
  int difference = !same_groups(groups) ? BNB_FSDP_GATHER_GROUPS
                   : !same_state(state) ? BNB_FSDP_GATHER_STATE
                                        : 0;
  // From here on Python code may run (properties, comparisons), so only objects that the table's owner keeps
  // are used.
  for (size_t i = 0; i < entries_.size() && !difference; ++i) {
    // After a backward pass little is in the cache. Not in a function of its own: GCC drops calls that only
    // prefetch.
    if (i + kAhead < entries_.size()) {
      const Entry& next = entries_[i + kAhead];
      for (int32_t j = 0; j < next.line_count; ++j) __builtin_prefetch(lines_[next.lines + j]);
    }
    difference = look(entries_[i], pointers);
  }
  if (!difference) return static_cast<int64_t>(held_.size());
  host_.clear_error();
  release();
  return -difference;
}

void Table::release() {
  std::vector<void*> held;
  held.swap(held_);  // dropping a reference may run Python code that comes back here
  for (void* gradient : held) host_.release(gradient);
  held.clear();
  if (held_.empty()) held_.swap(held);
}

}  // namespace

void* bnb_fsdp_gather_new(const bnb_fsdp_gather_host* host, int64_t groups) {
  const ExchangeApi* api = static_cast<const ExchangeApi*>(host->exchange_api);
  if (!api || api->major != bnb_fsdp::dlpack::kMajorVersion || !api->tensor_from_object) return nullptr;
  try {
    return new Table(*host, groups);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

int bnb_fsdp_gather_add(void* table, const bnb_fsdp_gather_parameter* parameter) {
  try {
    return static_cast<Table*>(table)->add(*parameter) ? 0 : -1;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

void bnb_fsdp_gather_order(void* table, const int64_t* indices, int64_t count) {
  static_cast<Table*>(table)->order(indices, count);
}

int64_t bnb_fsdp_gather(void* table, void* groups, void* state, uint64_t* pointers) {
  return static_cast<Table*>(table)->gather(groups, state, pointers);
}

void bnb_fsdp_gather_release(void* table) { static_cast<Table*>(table)->release(); }

void bnb_fsdp_gather_delete(void* table) { delete static_cast<Table*>(table); }
