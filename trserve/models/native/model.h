// What a step needs to know: a model's weights and one step's tokens, as the caller describes them.
// Plain structures that Python fills (library.py has the same fields); nothing is owned here.
#pragma once

#include "linear.h"

namespace trs {

struct Layer {
  Matrix qkv;      // rows by KV head: the queries that share it, its key, its value
  Matrix output;
  Matrix gate_up;  // gate's rows, then up's
  Matrix down;
  const float* input_norm;  // [hidden], times sqrt(hidden); null where folded into the weights
  const float* mlp_norm;
  const float* head_norm;   // [group + 1, dim], times sqrt(dim); null where there is none
  void* cache;              // [blocks, kv_heads, 2, block_size, dim]
};

// Changes with the meaning of anything in this file or of the functions that take it.
constexpr int64_t kInterfaceVersion = 3;

struct ModelSpec {
  const Layer* layers;
  const void* embedding;    // [vocab, hidden]
  const float* final_norm;
  const float* tap_norm;    // the last layer's mlp_norm, whether folded or not; null without layers
  Matrix head;
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t block_size;
  Kind kind;                // of embedding, norms' results and cache: float32 or bfloat16
  float eps;
};

struct StepSpec {
  const int64_t* token_ids;    // [tokens]
  const int64_t* positions;    // [tokens]
  const int64_t* slots;        // [tokens]
  const int32_t* query_start;  // [rows + 1]
  const int32_t* block_tables;
  const float* rotations;      // [positions, dim / 2] complex
  const int64_t* wanted;       // [hidden_count], tokens whose hidden state is wanted
  float* hidden;               // [hidden_count, hidden]
  float* logits;               // [logits_count, vocab], of the first of them
  float* tap;                  // [logits_count, hidden], what the last layer's MLP reads; or null
  int64_t* heartbeat;          // set to CLOCK_MONOTONIC, in ns, before each layer; or null
  int64_t tokens;
  int64_t rows;
  int64_t table_stride;
  int64_t hidden_count;
  int64_t logits_count;
};

}  // namespace trs
