// Answers in one call whether everything a plan relies on is as it was planned, and where this step's gradients
// lie.
//
// Called with the GIL held (ctypes.PyDLL). PyObject* are void*: the library is built without Python's headers
// and gets the functions of the stable ABI that it needs handed over, so that one build serves every Python.
// Used by bnb_fsdp/backends/gather.py alone; backends/native.py checks that package and library belong
// together.
#pragma once
#include <stdint.h>

#include "../c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

// How a built-in property of tensors is read, as in PyGetSetDef; returns a new reference.
typedef struct {
  void* (*get)(void* object, void* closure);
  void* closure;
} bnb_fsdp_gather_getter;

// What the host hands over: functions of CPython's stable ABI, torch's DLPack exchange interface, objects to
// compare. Objects are borrowed and must live as long as any table.
typedef struct {
  void* (*get_attribute)(void* object, void* name);                            // PyObject_GetAttr
  int (*compare)(void* first, void* second, int operation);                    // PyObject_RichCompareBool
  intptr_t (*list_size)(void* list);                                           // PyList_Size
  void* (*list_item)(void* list, intptr_t index);                              // PyList_GetItem
  void* (*dict_item)(void* dict, void* key);                                   // PyDict_GetItem
  int (*dict_next)(void* dict, intptr_t* position, void** key, void** value);  // PyDict_Next
  void (*release)(void* object);                                               // Py_DecRef
  void (*clear_error)(void);                                                   // PyErr_Clear
  void* (*is_negated)(void* tensor, void* nothing);                            // C function of Tensor.is_neg
  const void* exchange_api;                                                    // DLPackExchangeAPI
  bnb_fsdp_gather_getter gradient, requires_gradient;                          // of a parameter
  int64_t type, local, spec;  // offsets in bytes: of any object's type, of a sharded tensor's slots
  void *none, *false_;
  void *tensor_type, *sharded_type;  // torch.Tensor, DTensor
  void* params;                      // key in a group: interned str
  void* layout[3];                   // attributes in which two sharded tensors with different specs must agree
} bnb_fsdp_gather_host;

// One parameter, in the order of the groups. Objects are borrowed and must live as long as the table, and so
// must the storages of the state tensors.
typedef struct {
  void* parameter;
  void* local;        // its local tensor: of an unsharded one, itself
  void* values;       // its state dict; NULL for a frozen parameter, which is only checked to be still that
  void* const* keys;  // `count` keys of `values` in its order, the very objects, and their tensors
  void* const* tensors;
  void* probed;              // the one state tensor whose storage is looked at
  const void* const* lines;  // cache lines worth fetching before it is looked at; only hints
  int64_t count, line_count;
  int64_t group;
  int64_t slot;  // where its gradient's pointer goes
  int32_t sharded;
  int32_t gradient_dtype;  // bnb_fsdp_dtype
} bnb_fsdp_gather_parameter;

// What gather returns, negated, where Python has to look.
enum bnb_fsdp_gather_difference {
  BNB_FSDP_GATHER_GROUPS = 1,     // other groups or parameters
  BNB_FSDP_GATHER_STATE = 2,      // other state dicts, tensors or order
  BNB_FSDP_GATHER_PARAMETER = 3,  // other storage, shape, strides, dtype or device
  BNB_FSDP_GATHER_STORAGE = 4,    // other storage of state
  BNB_FSDP_GATHER_FROZEN = 5,     // a frozen parameter that is so no longer
  BNB_FSDP_GATHER_GRADIENT = 6    // a gradient that does not lie as its parameter does
};

// NULL where the exchange interface is of another major version or lacks what is needed.
BNB_FSDP_API void* bnb_fsdp_gather_new(const bnb_fsdp_gather_host* host, int64_t groups);
// 0, or -1 where a tensor cannot be described (no storage, meta device, a wrapper).
BNB_FSDP_API int bnb_fsdp_gather_add(void* table, const bnb_fsdp_gather_parameter* parameter);
// The parameters with state by index of addition, in the order of the optimizer's state.
BNB_FSDP_API void bnb_fsdp_gather_order(void* table, const int64_t* indices, int64_t count);
// The number of gradients, with pointers[slot] set for every slot (0: no gradient, 1: an empty one) and a
// reference to each gradient held until `release`; or -bnb_fsdp_gather_difference, with nothing held. No
// exception is left set.
BNB_FSDP_API int64_t bnb_fsdp_gather(void* table, void* groups, void* state, uint64_t* pointers);
BNB_FSDP_API void bnb_fsdp_gather_release(void* table);
BNB_FSDP_API void bnb_fsdp_gather_delete(void* table);

#ifdef __cplusplus
}
#endif
