// Least squares, late points first: y = rest + slope * x, both 0 or more. For times by bytes: what each call costs, and each byte.
#pragma once

#include <algorithm>
#include <cstdint>

struct spac_line_fit {
    static constexpr double   KEPT    = 0.98; // the factor of all earlier points' weights at each new one
    static constexpr uint64_t N_FIRST = 16;   // points before the line says something
    static constexpr double   FAR     = 4.0;  // points are cut off at so many times the line: a thread lost its core meanwhile

    void add(double px, double py) {
        if (is_known()) {
            py = std::min(py, FAR * at(px));
        }
        n_points++;
        n                = KEPT * n + 1;
        x                = KEPT * x + px;
        y                = KEPT * y + py;
        xx               = KEPT * xx + px * px;
        xy               = KEPT * xy + px * py;
        const double det = n * xx - x * x;
        slope            = det > 1e-6 * n * xx ? (n * xy - x * y) / det : 0;
        rest             = (y - slope * x) / n;
        if (slope <= 0 || rest < 0) { // all x are alike, or noise: a line through the origin
            slope = y / x;
            rest  = 0;
        }
    }

    // what was seen counts no more than the next point
    void forget() {
        for (double * sum : { &x, &y, &xx, &xy, &n }) {
            *sum /= n;
        }
    }

    bool is_known() const { return n_points >= N_FIRST; }

    double at(double px) const { return px > 0 ? rest + slope * px : 0; }

  private:
    uint64_t n_points = 0;
    double   n = 0, x = 0, y = 0, xx = 0, xy = 0, slope = 0, rest = 0;
};
