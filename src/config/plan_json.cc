// The plan as JSON.
#include "src/config/json_writer.h"
#include "src/config/setting_lines.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

void write_settings(JsonWriter& json, const Settings& s) {
  json.key("settings").begin_object();
  for (const SettingLine& line : setting_lines(s)) {
    json.key(line.name).begin_object().key("value");
    std::visit([&](const auto& value) { json.value(value); }, line.value);
    json.field("origin", to_string(line.origin)).field("where", line.where).end_object();
  }
  json.end_object();
  json.key("launch").begin_object();
  json.field("data_ranks", s.launch.data_ranks);
  json.field("pipeline_stages", s.launch.pipeline_stages);
  json.field("tensor_ranks", s.launch.tensor_ranks).end_object();
  json.key("batch").begin_object();
  json.field("train_batch_size", s.batch.train_batch);
  json.field("train_micro_batch_size_per_gpu", s.batch.micro_batch);
  json.field("gradient_accumulation_steps", s.batch.accumulation_steps).end_object();
}

void write_size(JsonWriter& json, const ModelSize& size) {
  json.key("size").begin_object();
  json.field("parameters", size.parameters).field("local_elements", size.local_elements);
  json.field("shard_elements", size.shard_elements);
  json.field("shard_elements_fp32_moments", size.shard_elements_fp32_moments);
  json.field("fp32_parameters", size.fp32_parameters);
  json.field("shard_elements_fp32_weights", size.shard_elements_fp32_weights);
  json.field("buckets", size.buckets).end_object();
}

void write_rows(JsonWriter& json, const Plan& plan) {
  json.key("rows").begin_array();
  for (const PlanRow& row : plan.rows) {
    const bool callers = row.component == Component::kTransient;
    json.begin_object();
    json.field("component", callers ? std::string_view("caller") : to_string(row.component));
    json.field("name", row.name).field("dtype", row.dtype).field("place", row.place);
    json.field("bytes", row.bytes).field("origin", to_string(row.origin));
    json.field("where", row.where).end_object();
  }
  json.end_array();
}

void write_collectives(JsonWriter& json, const Plan& plan) {
  json.key("collectives").begin_array();
  for (const PlanCollective& c : plan.collectives) {
    json.begin_object().field("what", c.what).field("operation", c.operation);
    json.field("dtype", to_string(c.dtype)).field("ranks", c.ranks);
    json.field("calls_per_step", c.calls_per_step);
    json.field("bytes_per_step", c.bytes_per_step).end_object();
  }
  json.end_array();
}

void write_totals(JsonWriter& json, const Plan& plan) {
  std::int64_t bytes = 0, wire = 0;
  for (const PlanRow& row : plan.rows) bytes += row.bytes;
  for (const PlanCollective& c : plan.collectives) wire += c.bytes_per_step;
  json.key("totals").begin_object();
  json.field("bytes", bytes).field("state_bytes", plan.state_bytes());
  json.field("bytes_per_parameter", plan.bytes_per_parameter());
  json.field("wire_bytes_per_step", wire).end_object();
  const TemporaryBytes temporary = temporary_bytes(plan.settings, plan.size);
  json.key("temporary_bytes").begin_object();
  json.field("per_bucket", temporary.per_bucket).field("weights", temporary.weights).end_object();
}

}  // namespace

std::string plan_json(const Plan& plan) {
  JsonWriter json;
  json.begin_object();
  write_settings(json, plan.settings);
  write_size(json, plan.size);
  write_rows(json, plan);
  write_collectives(json, plan);
  write_totals(json, plan);
  json.field("averaging", plan.averaging);
  json.key("warnings").begin_array();
  for (const std::string& warning : plan.settings.warnings) json.value(warning);
  json.end_array().end_object();
  return json.text() + "\n";
}

}  // namespace zerofp8
