"""The probability of a token as an integer, so that every device cuts at the same one.

Owns the numbers of that definition. Sums of floats depend on their order, and exponentials on who
computes them; where truncation cuts would depend on both. So a probability is measured in whole
steps below the likeliest token's, and its mass relative to that is a fixed-point number:

    depth = floor((top - x) * STEPS_PER_NAT)              float32, each operation rounded once
    mass  = floor(polynomial(depth mod STEPS) * 2^10 / 2^(depth div STEPS))

``x`` is the logit divided by the temperature, ``top`` the row's largest. A step is 2^-21 of a power
of two. The polynomial is 2^(30 - part / STEPS) with a relative error below 1e-7, evaluated in
integers from the last coefficient on: ``m = coefficient - (m * part >> STEP_BITS)``. Masses fall as
depths grow; the likeliest token has ``1 << MASS_BITS``, so the sum of 2^22 tokens fits an int64.
Must not know how tokens are selected.
"""

STEP_BITS = 21
STEPS_PER_NAT = 3025550.75
"""2^21 / log(2), rounded to float32."""

DEEPEST = 1000.0 * 2**STEP_BITS
"""What lies deeper, or is -inf or NaN, counts as this deep; nothing there has any mass."""

MASS_BITS = 40
COEFFICIENTS = (1073741824, 744257402, 257891457, 59375066, 9884628, 1014574)
