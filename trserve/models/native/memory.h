// Aligned arrays. Knows no model.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

namespace trs {

template <class T>
using Array = std::unique_ptr<T[], void (*)(void*)>;

// `size` elements, not initialised, at a cache line. std::bad_alloc where there is no memory.
template <class T>
Array<T> aligned(int64_t size) {
  const size_t bytes = ((size > 0 ? size : 1) * sizeof(T) + 63) / 64 * 64;
  T* memory = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (!memory) throw std::bad_alloc();
  return Array<T>(memory, std::free);
}

}  // namespace trs
