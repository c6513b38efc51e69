// What a run shows at its end, and the JSON that plots and studies read.
#pragma once

#include <string>
#include <vector>

#include "trainer.h"

namespace zerofp8::example {

// `baseline` may be null.
std::string summary_text(const RunResult& run, const RunResult* baseline);
std::string results_json(const std::vector<const RunResult*>& runs, const RunOptions& options,
                         int ranks);

}  // namespace zerofp8::example
