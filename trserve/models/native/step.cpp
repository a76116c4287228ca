// One forward pass of a dense decoder in one call. Threads go through its phases together (team.h):
// one begins when all tasks of the one before are done, and may read what that wrote. Residuals,
// norms, rotations and softmax are in float32; products take the weights' type. Knows no requests.

#include <time.h>
#include <algorithm>

#include "attention.h"
#include "memory.h"
#include "model.h"
#include "norm.h"
#include "team.h"

namespace trs {
namespace {

constexpr int kPhasesPerLayer = 9;
constexpr int64_t kLongRow = 1024;  // from here on one row's attention is shared among threads

// Consecutive tokens of a row of the step.
struct Block {
  int row, first, tokens;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual void step(const StepSpec& step) = 0;
};

template <class D>
class TypedModel final : public Model {
  using X = typename Input<D>::Type;

 public:
  TypedModel(const ModelSpec& spec, int threads, int spin)
      : spec_(spec),
        shape_{int(spec.heads / spec.kv_heads), int(spec.kv_heads), int(spec.dim)},
        team_(threads, spin, int(spec.num_layers) * kPhasesPerLayer + 3) {
    qkv_width_ = (spec.heads + 2 * spec.kv_heads) * spec.dim;
    int64_t widest = spec.head.columns;
    for (int64_t i = 0; i < spec.num_layers; ++i) {
      widest = std::max(widest, spec.layers[i].down.columns);
      widest = std::max(widest, spec.layers[i].output.columns);
    }
    scratch_stride_ = kWideRows * widest;
    scratch_ = aligned<X>(threads * scratch_stride_);
    partials_ = aligned<Partial>((kQueryBlock + 1) * threads);
  }

  void step(const StepSpec& step) override {
    step_ = &step;
    make_room(step.tokens);
    plan_blocks();
    plan_segments();
    team_.run([](void* self, int thread) { static_cast<TypedModel*>(self)->work(thread); }, this);
  }

 private:
  // Whatever grows with the number of tokens. A larger step comes seldom, and keeps its memory.
  void make_room(int64_t tokens) {
    if (tokens <= capacity_) return;
    capacity_ = tokens < 64 ? 64 : 2 * tokens;
    const int64_t q = spec_.heads * spec_.dim;
    x_ = aligned<float>(capacity_ * spec_.hidden);
    normed_ = aligned<X>(capacity_ * spec_.hidden);
    qkv_ = aligned<float>(capacity_ * qkv_width_);
    queries_ = aligned<X>(capacity_ * q);
    attended_ = aligned<X>(capacity_ * q);
    active_ = aligned<X>(capacity_ * spec_.intermediate);
    blocks_ = aligned<Block>(capacity_);
  }

  // Consecutive tokens of a row that attend together.
  void plan_blocks() {
    num_blocks_ = 0;
    for (int row = 0; row < int(step_->rows); ++row) {
      const int last = step_->query_start[row + 1];
      for (int first = step_->query_start[row]; first < last; first += kQueryBlock) {
        blocks_[num_blocks_++] = {row, first, std::min(kQueryBlock, last - first)};
      }
    }
  }

  // -- the phases ---------------------------------------------------------------------------

  void work(int thread) {
    int phase = 0;
    const int tokens = int(step_->tokens);
    each(phase++, tokens, [&](int t) { embed(t); });
    for (int64_t i = 0; i < spec_.num_layers; ++i) {
      const Layer& layer = spec_.layers[i];
      if (thread == 0) beat();
      each(phase++, tokens, [&](int t) { norm(layer.input_norm, t); });
      product(phase++, thread, layer.qkv, normed_.get(), tokens,
              [&](int r, int t, float value) { qkv_[t * qkv_width_ + r] = value; });
      each(phase++, tokens * shape_.kv_heads, [&](int task) { rotate_and_store(layer, task); });
      phase = attention(phase, thread, layer);
      product(phase++, thread, layer.output, attended_.get(), tokens,
              [&](int r, int t, float value) { x_[t * spec_.hidden + r] += value; });
      const int taps = step_->tap && i == spec_.num_layers - 1 ? int(step_->logits_count) : 0;
      each(phase++, tokens + taps, [&](int t) { t < tokens ? norm(layer.mlp_norm, t) : tap(t - tokens); });
      gated(phase++, thread, layer.gate_up, tokens);
      product(phase++, thread, layer.down, active_.get(), tokens,
              [&](int r, int t, float value) { x_[t * spec_.hidden + r] += value; });
    }
    each(phase++, int(step_->hidden_count), [&](int i) { final_norm(i); });
    product(phase++, thread, spec_.head, normed_.get(), int(step_->logits_count),
            [&](int r, int t, float value) { step_->logits[t * spec_.head.rows + r] = value; });
  }

  // A sign of life: a step of a large model over a long chunk takes many seconds.
  void beat() const {
    if (!step_->heartbeat) return;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    __atomic_store_n(step_->heartbeat, now.tv_sec * int64_t(1000000000) + now.tv_nsec, __ATOMIC_RELAXED);
  }

  template <class Task>
  void each(int phase, int count, Task task) {
    team_.each(phase, count, task);
  }

  // A few tasks a thread, each of some rows.
  int rows_per_task(int64_t rows) const {
    const int64_t share = rows / (team_.threads() * 6);
    return int(team_.threads() == 1 ? rows : std::max<int64_t>(16, (share + 7) / 8 * 8));
  }

  template <class Emit>
  void product(int phase, int thread, const Matrix& matrix, const X* input, int tokens, Emit emit) {
    const int rows = int(matrix.rows), size = std::max(1, rows_per_task(rows));
    each(phase, tokens ? (rows + size - 1) / size : 0, [&](int i) {
      const int first = i * size, last = std::min(rows, first + size);
      for (int from = 0; from < tokens; from += kTokenBlock) {
        const X* block = input + from * matrix.columns;
        run(thread, matrix, block, first, last, std::min(kTokenBlock, tokens - from),
            [&](int r, int t, float value) { emit(r, from + t, value); });
      }
    });
  }

  template <class Emit>
  void run(int thread, const Matrix& matrix, const X* input, int first, int last, int tokens, Emit emit) {
    X* scratch = scratch_.get() + thread * scratch_stride_;
    if (matrix.kind == Kind::kInt8) {
      multiply<int8_t>(matrix, input, matrix.columns, first, last, tokens, scratch, emit);
    } else {
      multiply<D>(matrix, input, matrix.columns, first, last, tokens, scratch, emit);
    }
  }

  // silu(gate) * up. A task computes the same rows of both, so nobody waits for the other half.
  void gated(int phase, int thread, const Matrix& matrix, int tokens) {
    const int width = int(spec_.intermediate), size = std::min(kGatedRows, rows_per_task(width));
    each(phase, (width + size - 1) / size, [&](int i) {
      const int first = i * size, last = std::min(width, first + size);
      for (int from = 0; from < tokens; from += kTokenBlock) {
        gate_block(thread, matrix, first, last, from, std::min(kTokenBlock, tokens - from));
      }
    });
  }

  void gate_block(int thread, const Matrix& matrix, int first, int last, int from, int tokens) {
    alignas(64) float gates[kGatedRows * kTokenBlock], ups[kGatedRows * kTokenBlock];
    const int width = int(spec_.intermediate);
    const X* input = normed_.get() + from * spec_.hidden;
    run(thread, matrix, input, first, last, tokens,
        [&](int r, int t, float gate) { gates[t * kGatedRows + r - first] = gate; });
    run(thread, matrix, input, width + first, width + last, tokens,
        [&](int r, int t, float up) { ups[t * kGatedRows + r - width - first] = up; });
    for (int t = 0; t < tokens; ++t) {
      X* out = active_.get() + (from + t) * spec_.intermediate + first;
      activate(gates + t * kGatedRows, ups + t * kGatedRows, last - first, out);
    }
  }

  // -- tokens -------------------------------------------------------------------------------

  void embed(int t) {
    const D* row = static_cast<const D*>(spec_.embedding) + step_->token_ids[t] * spec_.hidden;
    float* x = x_.get() + t * spec_.hidden;
    for (int64_t i = 0; i < spec_.hidden; ++i) x[i] = to_float(row[i]);
  }

  void norm(const float* scale, int t) {
    normalize_into(x_.get() + t * spec_.hidden, scale, spec_.hidden, spec_.eps, normed_.get() + t * spec_.hidden);
  }

  void final_norm(int i) {
    float* hidden = step_->hidden + i * spec_.hidden;
    normalize_into(x_.get() + step_->wanted[i] * spec_.hidden, spec_.final_norm, spec_.hidden, spec_.eps, hidden);
    if (i >= step_->logits_count) return;
    X* out = normed_.get() + i * spec_.hidden;
    for (int64_t j = 0; j < spec_.hidden; ++j) store_as(out + j, hidden[j]);
  }

  void tap(int i) {
    const float* x = x_.get() + step_->wanted[i] * spec_.hidden;
    normalize_into(x, spec_.tap_norm, spec_.hidden, spec_.eps, step_->tap + i * spec_.hidden);
  }

  // -- attention ----------------------------------------------------------------------------

  void rotate_and_store(const Layer& layer, int task) {
    const int t = task / shape_.kv_heads, head = task % shape_.kv_heads;
    const int dim = shape_.dim, group = shape_.group;
    float* rows = qkv_.get() + t * qkv_width_ + head * (group + 2) * dim;
    const float* turns = step_->rotations + step_->positions[t] * dim;
    const float factor = 1.0f / std::sqrt(float(dim));
    for (int g = 0; g <= group; ++g) {
      float* row = rows + g * dim;
      if (layer.head_norm) normalize(row, dim, layer.head_norm + g * dim, float(dim) * spec_.eps);
      rotate(row, turns, dim, g < group ? factor : 1.0f);
    }
    X* queries = queries_.get() + (int64_t(t) * shape_.kv_heads + head) * group * dim;
    for (int i = 0; i < group * dim; ++i) store_as(queries + i, rows[i]);
    D* key = key_at(layer, step_->slots[t], head);
    D* value = key + spec_.block_size * dim;
    for (int i = 0; i < dim; ++i) store_as(key + i, rows[group * dim + i]);
    for (int i = 0; i < dim; ++i) store_as(value + i, rows[(group + 1) * dim + i]);
  }

  // Whether few long rows leave threads without work unless a row is shared.
  void plan_segments() {
    const StepSpec& step = *step_;
    segments_ = 0;
    const bool singles = num_blocks_ == step.tokens;
    if (team_.threads() == 1 || !singles || step.tokens * shape_.kv_heads >= 4 * team_.threads()) return;
    int64_t longest = 0;
    for (int64_t t = 0; t < step.tokens; ++t) longest = std::max(longest, step.positions[t] + 1);
    if (longest < kLongRow) return;
    segments_ = int((longest + kSegment - 1) / kSegment);
    const int64_t needed = step.tokens * shape_.kv_heads * segments_;
    if (needed > shared_size_) {
      shared_size_ = needed;
      shared_ = aligned<Partial>(shared_size_);
    }
  }

  int attention(int phase, int thread, const Layer& layer) {
    if (segments_) return shared_attention(phase, layer);
    const int heads = shape_.kv_heads;
    each(phase, num_blocks_ * heads, [&](int task) {
      const Block& block = blocks_[task / heads];
      const int head = task % heads, last = block.first + block.tokens - 1;
      Partial* mine = partials_.get() + (kQueryBlock + 1) * thread;
      const auto pair = [&](int i) { return (block.first + i) * heads + head; };
      attend(
          shape_, cache(layer, block.row, head), block.tokens, int(step_->positions[last]) + 1,
          [&](int i) { return queries(pair(i)); }, [&](int i) { return attended(pair(i)); }, mine,
          mine[kQueryBlock]);
    });
    return phase + 2;
  }

  // As above, for few tokens: a task is one segment of one token, all segments are merged after it.
  int shared_attention(int phase, const Layer& layer) {
    const int heads = shape_.kv_heads, blocks = num_blocks_;
    each(phase, blocks * heads * segments_, [&](int task) {
      const int pair = task / segments_, first = task % segments_ * kSegment;
      const Block& block = blocks_[pair / heads];
      const int count = std::min(kSegment, length(block) - first);
      if (count <= 0) return;
      const Segment<D> segment(shape_, cache(layer, block.row, pair % heads), first, count);
      attend_segment(shape_, queries(pair), segment, count, shared_[task]);
    });
    each(phase + 1, blocks * heads, [&](int pair) {
      Partial& total = shared_[pair * segments_];
      for (int i = 1; i * kSegment < length(blocks_[pair / heads]); ++i) {
        merge(shape_, shared_[pair * segments_ + i], total);
      }
      finish(shape_, total, attended(pair));
    });
    return phase + 2;
  }

  int length(const Block& block) const { return int(step_->positions[block.first]) + 1; }

  const X* queries(int pair) const { return queries_.get() + int64_t(pair) * shape_.group * shape_.dim; }
  X* attended(int pair) const { return attended_.get() + int64_t(pair) * shape_.group * shape_.dim; }

  D* key_at(const Layer& layer, int64_t slot, int head) const {
    const int64_t size = spec_.block_size, row = slot / size * shape_.kv_heads + head;
    return static_cast<D*>(layer.cache) + (row * 2 * size + slot % size) * shape_.dim;
  }

  HeadCache<D> cache(const Layer& layer, int row, int head) const {
    const int64_t stride = shape_.kv_heads * 2 * spec_.block_size * shape_.dim;
    const int32_t* blocks = step_->block_tables + row * step_->table_stride;
    return {key_at(layer, 0, head), blocks, stride, int(spec_.block_size), shape_.dim};
  }

  static constexpr int kGatedRows = 64;
  static constexpr int kTokenBlock = 64;  // their inputs stay in the second-level cache
  static constexpr int kQueryBlock = 16;

  const ModelSpec spec_;
  const HeadShape shape_;
  Team team_;
  const StepSpec* step_ = nullptr;
  int64_t capacity_ = 0, qkv_width_ = 0, scratch_stride_ = 0, shared_size_ = 0;
  int segments_ = 0, num_blocks_ = 0;
  Array<float> x_{nullptr, std::free}, qkv_{nullptr, std::free};
  Array<X> normed_{nullptr, std::free}, queries_{nullptr, std::free}, attended_{nullptr, std::free};
  Array<X> active_{nullptr, std::free}, scratch_{nullptr, std::free};
  Array<Block> blocks_{nullptr, std::free};
  Array<Partial> partials_{nullptr, std::free}, shared_{nullptr, std::free};
};

}  // namespace
}  // namespace trs

#define TRS_EXPORT __attribute__((visibility("default")))

extern "C" {

// What library.py must find: the version, and the sizes of the structures as it knows them.
TRS_EXPORT int64_t trs_interface() {
  return ((trs::kInterfaceVersion * 1000 + sizeof(trs::Layer)) * 1000 + sizeof(trs::ModelSpec)) * 1000 +
         sizeof(trs::StepSpec);
}

// Head dimensions must be a multiple of this, for the kernels' vectors.
TRS_EXPORT int64_t trs_dim_multiple(int32_t kind) {
  return trs::Kind(kind) == trs::Kind::kFloat32 ? trs::kLanes : trs::kStride<trs::bf16, trs::Input<trs::bf16>::Type>;
}

TRS_EXPORT void* trs_create(const trs::ModelSpec* spec, int32_t threads, int32_t spin) {
  if (spec->kind == trs::Kind::kFloat32) return new trs::TypedModel<float>(*spec, threads, spin);
  return new trs::TypedModel<trs::bf16>(*spec, threads, spin);
}

TRS_EXPORT void trs_step(void* model, const trs::StepSpec* step) { static_cast<trs::Model*>(model)->step(*step); }

TRS_EXPORT void trs_destroy(void* model) { delete static_cast<trs::Model*>(model); }
}
