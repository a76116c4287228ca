"""The CUDA source of the copies, as text. Compiled by NVRTC where there is a GPU.

``trserve_push`` runs one block a record. Its order is that of ``inbox.stores``: both ``seq`` words
are cleared; payload and headers are written; the barrier gathers all threads' stores before thread
0, whose ``st.release.sys`` of the entry's ``seq`` (for readers on GPUs) and then of the notice's
(for the receiver's host) make them visible first, to every processor of the machine (the release is
cumulative over the barrier). Clearing comes before the payload by a fence of system scope, so that
a host that looks in between finds 0. The last store gives the command back to the host that wrote
it. No kernel here waits for anything.

Knows where words are, but nothing of what they mean beyond ``seq`` and ``count``.
"""

from __future__ import annotations

from typing import Final

THREADS: Final = 64
"""As many as a record has words."""

COMMAND_WORDS: Final = 4
"""Source; entry, or destination; notice, or count; state, see staging.py."""

SOURCE: Final = r"""
typedef long long word;

static __device__ __forceinline__ void release_sys(word* at, word value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ void store_sys(word* at, word value) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ void give_back(word* command) {
  release_sys(command + 3, -command[3]);
}

extern "C" __global__ void trserve_push(word* commands, word first, word mask) {
  word* command = commands + 4 * ((first + blockIdx.x) & mask);
  const word* source = (const word*)command[0];
  word* entry = (word*)command[1];
  word* notice = (word*)command[2];
  const int words = 8 + (int)(((source[2] >> 32) + 1) >> 1);
  if (threadIdx.x == 0) {
    store_sys(notice, 0);
    store_sys(entry, 0);
    __threadfence_system();
  }
  __syncthreads();
  for (int i = 1 + threadIdx.x; i < words; i += blockDim.x) {
    const word value = source[i];
    store_sys(entry + i, value);
    if (i < 8) store_sys(notice + i, value);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const word seq = source[0];
    release_sys(entry, seq);
    release_sys(notice, seq);
    give_back(command);
  }
}

extern "C" __global__ void trserve_collect(word* commands, word first, word mask) {
  word* command = commands + 4 * ((first + blockIdx.x) & mask);
  const int* source = (const int*)command[0];
  int* destination = (int*)command[1];
  const int count = (int)command[2];
  for (int i = threadIdx.x; i < count; i += blockDim.x) destination[i] = source[i];
  word* wide = (word*)destination;
  for (int i = threadIdx.x; i < -count; i += blockDim.x) wide[i] = source[i];
  __syncthreads();
  if (threadIdx.x == 0) give_back(command);
}
"""
