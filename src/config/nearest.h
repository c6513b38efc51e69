// Which known key was probably meant.
#pragma once

#include <string>
#include <string_view>

namespace zerofp8 {

// Edit distance with swaps of neighbours ("bukcet" is 1 from "bucket").
int edit_distance(std::string_view a, std::string_view b);

// The known key nearest to an unknown one: a sibling if one is near, else a key of that name
// elsewhere, else the nearest sibling. Never empty.
std::string nearest_key(std::string_view unknown_path);

}  // namespace zerofp8
