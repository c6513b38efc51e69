// What a checkpoint holds beside the tensors, and its layout on disk:
//
//   ROOT/latest                                     name of the newest complete checkpoint
//   ROOT/step-00000020/index.json                   of the run; written last, inside a temporary
//   folder ROOT/step-00000020/model-00000.json             of one model slice: parameters and where
//   their pieces are ROOT/step-00000020/model-00000.data-00002-of-00004.safetensors
//
// A piece is a run of whole blocks of one parameter, with its codes and scales as they are, so that
// any number of ranks can load it by copying bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "src/optim/file_io.h"
#include "src/optim/loss_scaler.h"
#include "zerofp8/communicator.h"
#include "zerofp8/config.h"

namespace zerofp8 {

inline constexpr int kCheckpointVersion = 1;

// Storage choices that must be the same to load by copying bytes.
struct CheckpointFormat {
  std::string exp_avg, exp_avg_sq, master, weight;
  int block_size = 0;
  bool operator==(const CheckpointFormat&) const = default;
};

struct CheckpointPiece {
  std::string file;
  std::int64_t offset = 0, elements = 0;  // in the logical parameter
};

struct CheckpointParameter {
  std::vector<std::int64_t> shape;
  std::string dtype;
  bool fp32_moments = false;
  std::int64_t step = 0;
  double guard_c = 0;
  std::vector<CheckpointPiece> pieces;  // in order of offset
};

struct CheckpointFile {
  std::string name;
  FileDigest digest;
};

// model-NNNNN.json
struct ModelIndex {
  std::string id;
  CheckpointFormat format;
  std::map<std::string, CheckpointParameter> parameters;
  std::vector<CheckpointFile> files;
};

// index.json
struct RunIndex {
  int version = kCheckpointVersion;
  std::string id;  // random; every file of one save carries it
  std::int64_t applied = 0, skipped = 0;
  std::uint64_t seed = 0;
  LossScaler::State scaler;
  std::vector<AdamOptions> groups;
  std::vector<CheckpointFile> models;
};

std::string to_json(const ModelIndex& index);
std::string to_json(const RunIndex& index);
// Throw CheckpointError that names `path`.
ModelIndex model_index_from_json(const std::string& path, const std::string& text);
RunIndex run_index_from_json(const std::string& path, const std::string& text);

// Whether `folder` is one complete checkpoint: its index is written last.
bool is_checkpoint(const std::filesystem::path& folder);

// Name of a piece's tensor in its file: "NAME/COMPONENT@OFFSET".
std::string tensor_name(const std::string& parameter, const std::string& component,
                        std::int64_t offset);

// The text of every rank, in rank order, on every rank.
std::vector<std::string> gather_texts(Communicator& comm, const std::string& mine);
// Every rank passes its own error ("" = none); returns the first one in rank order, on every rank.
std::string first_error(Communicator* data, Communicator* model, const std::string& mine);

}  // namespace zerofp8
