// A running average that begins with its first value.
#pragma once

// average: 0 before the first; weight: of this value, in what follows
inline void spac_blend(double & average, double value, double weight) {
    average = average == 0 ? value : average + weight * (value - average);
}
