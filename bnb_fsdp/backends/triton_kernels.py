"""The Triton kernels: one fused step for each (rule, bits), and the sums of squares for LAMB and LARS.

The arithmetic is that of `bnb_fsdp.rules`: IEEE division and square root, explicit fused multiply-adds, and no other
contraction (`triton_backend` compiles with ``enable_fp_fusion=False``). Subnormal gradients, states and parameters are
flushed to zero; subnormal intermediate results are not, which can move values below some 1e-30 alone. Nothing here is
of one vendor: no inline assembly, no libdevice, no warp size.

A program takes ``chunks`` times WIDTH elements of one tensor, with 8-bit states a block of 256 at a time. Chunks that
are whole and 16-byte aligned take a path without masks, whose accesses are vectors; tails and unaligned tensors take
the other.

Triton's interpreter multiplies and adds with two roundings and truncates to bfloat16, so there both are emulated. Nor
can it take a tensor as the bound of range(): hence the while loops.
"""

# mypy: ignore-errors
# Triton reads annotations and bodies of these functions itself; they are no Python that a type checker could follow.

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
BLOCK = tl.constexpr(256)
_TINY = tl.constexpr(2.0**-126)
_MINUS_MAX = tl.constexpr(-3.4028234663852886e38)
_INFINITY = tl.constexpr(0x7F800000)

# The encoding tables (`triton_backend.encoding_table`): buckets of 2**16 neighbouring float32 from 2**-23 to 1.
LOW = tl.constexpr((127 - 23) << 23)
HIGH = tl.constexpr(127 << 23)
BUCKETS = tl.constexpr((23 << 7) + 1)
# Where things lie in the table of maps: values of the signed and unsigned map, then the buckets of x >= 0 and x < 0 of
# the signed map, then of the unsigned.
_UNSIGNED_VALUES = tl.constexpr(256)
_SIGNED_BUCKETS = tl.constexpr(512)
_UNSIGNED_BUCKETS = tl.constexpr(512 + 2 * ((23 << 7) + 1))

# int64 a tensor in the table: parameter, three states, three scales, numel, first tile, step (0: on the host).
COLUMNS = tl.constexpr(10)
_NUMEL = tl.constexpr(7)
_FIRST_TILE = tl.constexpr(8)
_STEP = tl.constexpr(9)
# float32 a row of hyperparameters: those of a rule's `h`, and behind them the address of a learning rate or 0.
NUMBERS = tl.constexpr(16)
_RATE = tl.constexpr(12)


# --- Arithmetic


@triton.jit
def fma(a, b, c):
    """``a * b + c`` with one rounding."""
    if INTERPRETED:  # by way of float64 rounded to odd, as in bnb_fsdp.arithmetic
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = total.to(tl.int64, bitcast=True)
        inexact = (error == error) & (error != 0.0) & ((bits & 1) == 0)
        bits = tl.where(inexact, bits + tl.where((error > 0.0) == (total > 0.0), 1, -1), bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def rcp(x):
    """``1 / x``."""
    return tl.div_rn(1.0, x)


@triton.jit
def flush(x):
    """``x``, subnormal numbers replaced by zero of the same sign."""
    return tl.where(tl.abs(x) < _TINY, x * 0.0, x)


@triton.jit
def widen(x, T: tl.constexpr):
    """float32 of a value of dtype T."""
    if T == tl.float32:
        return x
    elif INTERPRETED and T == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, T: tl.constexpr):
    """``x`` (float32) rounded to nearest even in dtype T."""
    if T == tl.float32:
        return x
    elif INTERPRETED and T == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(T)


@triton.jit
def rounded(x, T: tl.constexpr):
    """``x`` (float32) rounded to dtype T, as float32."""
    return widen(narrow(x, T), T)


@triton.jit
def number(x):
    """A float argument as a float32 scalar (in the interpreter it is a Python float)."""
    return tl.full((), x, tl.float32)


@triton.jit
def negative(x):
    """``-x``, which Triton computes as ``0 - x``: wrong for zero."""
    return x * -1.0


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITY


# --- Rules: scalars from (beta1, beta2, beta3, alpha, eps, weight_decay, lr, scale, correction1, correction2, first),
# where a correction is 1 - beta**step; updates from (k, gradient, parameter, states), k being the scalars.


@triton.jit
def decay_of(lr, weight_decay):
    return tl.where(weight_decay > 0.0, fma(negative(lr), weight_decay, number(1.0)), 1.0)


@triton.jit
def adam_scalars(h, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    correction2 = tl.sqrt_rn(h[9])
    step_size = ((correction2 * h[6]) * -rcp(h[8])) * h[7]
    if PUBLISHED:  # the scale is one of the decay, too: see bnb_fsdp.rules
        decay = decay_of(h[6] * h[7], h[5])
        step_size = step_size * rcp(decay)
    else:
        decay = decay_of(h[6], h[5])
    return h[0], 1.0 - h[0], h[1], 1.0 - h[1], correction2, h[4], step_size, decay, h[5], h[8], h[9]


@triton.jit
def first_moment8(g, s, beta, rest):
    return flush(fma(g, rest, s * beta))


@triton.jit
def first_moment32(g, s, beta, rest):
    return flush(fma(s, beta, g * rest))


@triton.jit
def second_moment8(g, s, beta, rest, P: tl.constexpr):
    if P == tl.float32:
        v = fma(g, g * rest, s * beta)
    else:
        v = fma(s, beta, (g * rest) * g)
    return flush(v)


@triton.jit
def adam_parameter(k, p, m, v, P: tl.constexpr):
    denominator = fma(k[4], k[5], tl.sqrt_rn(v))
    p = rounded(fma(k[6], m * rcp(denominator), p), P)
    return rounded(flush(p * k[7]), P)


@triton.jit
def adam8(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    finite = is_finite(g)  # a non-finite element resets its states and leaves its parameter alone
    m = tl.where(finite, first_moment8(g, s1, k[0], k[1]), 0.0)
    v = tl.where(finite, second_moment8(g, s2, k[2], k[3], P), 0.0)
    return tl.where(finite, adam_parameter(k, p, m, v, P), p), m, v, s3


@triton.jit
def adam32(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    m = first_moment32(g, s1, k[0], k[1])
    v = flush(fma(s2, k[2], (g * g) * k[3]))
    return adam_parameter(k, p, m, v, P), m, v, s3


@triton.jit
def adam_direction(k, g, p, s1, s2, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    if BITS == 8:
        finite = is_finite(g)
        m = tl.where(finite, first_moment8(g, s1, k[0], k[1]), 0.0)
        v = tl.where(finite, second_moment8(g, s2, k[2], k[3], P), 0.0)
    else:
        m = first_moment32(g, s1, k[0], k[1])
        v = flush(fma(s2, k[2], (g * g) * k[3]))
    u = (m * rcp(k[9])) * rcp(tl.sqrt_rn(v * rcp(k[10])) + k[5])
    if PUBLISHED:
        u = tl.where(k[8] > 0.0, fma(p, k[8], u), u)
    return u


@triton.jit
def ademamix_scalars(h, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    inverse1, inverse2 = rcp(h[8]), rcp(tl.sqrt_rn(h[9]))
    decay = decay_of(h[6], h[5])
    return (
        h[0], 1.0 - h[0], h[1], 1.0 - h[1], h[2], 1.0 - h[2], inverse1, inverse2, h[3], h[4], negative(h[6]), decay,
    )  # fmt: skip


@triton.jit
def ademamix_parameter(k, p, m1, nu, m2, P: tl.constexpr):
    denominator = fma(tl.sqrt_rn(nu), k[7], k[9])
    numerator = fma(m2, k[8], m1 * k[6])
    p = rounded(fma(numerator * rcp(denominator), k[10], p), P)
    return rounded(flush(p * k[11]), P)


@triton.jit
def ademamix8(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    finite = is_finite(g)
    m1 = tl.where(finite, first_moment8(g, s1, k[0], k[1]), 0.0)
    nu = tl.where(finite, second_moment8(g, s2, k[2], k[3], P), 0.0)
    m2 = tl.where(finite, first_moment8(g, s3, k[4], k[5]), 0.0)
    return tl.where(finite, ademamix_parameter(k, p, m1, nu, m2, P), p), m1, nu, m2


@triton.jit
def ademamix32(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    m1 = first_moment32(g, s1, k[0], k[1])
    nu = flush(fma(s2, k[2], (g * k[3]) * g))
    m2 = first_moment32(g, s3, k[4], k[5])
    return ademamix_parameter(k, p, m1, nu, m2, P), m1, nu, m2


@triton.jit
def lion_scalars(h, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    lr = rounded(h[6], P) if BITS == 8 else h[6]  # upstream's 8-bit kernel keeps lr in the parameter's dtype
    return h[0], 1.0 - h[0], h[1], 1.0 - h[1], negative(lr), decay_of(h[6], h[5])


@triton.jit
def sign(x):
    """-1, 0 or 1; 0 for NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def lion8(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    change = sign(first_moment8(g, s1, k[0], k[1])) * k[4]
    p = rounded(flush(p * k[5]), P)
    return rounded(flush(p + change), P), first_moment8(g, s1, k[2], k[3]), s2, s3


@triton.jit
def lion32(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    change = sign(first_moment32(g, s1, k[0], k[1])) * k[4]
    if P == tl.float32 and not SKIP:  # upstream's code for skip_zeros rounds twice
        p = flush(fma(p, k[5], change))
    else:
        p = rounded(flush(p * k[5]), P)
        p = rounded(flush(p + change), P)
    return p, first_moment32(g, s1, k[2], k[3]), s2, s3


@triton.jit
def coupled_scalars(h, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    return h[0], 1.0 - h[0], h[4], h[5], h[6], h[6] * h[7], negative(h[7]), h[10]


@triton.jit
def decayed8(k, g, p):
    return tl.where(k[3] > 0.0, flush(fma(p, k[3], g)), g)


@triton.jit
def decayed32(k, g, p, fourth, P: tl.constexpr):
    """Kept in the parameter's dtype; in float32 every fourth element is fused: docs/upstream-arithmetic.md."""
    fused = rounded(flush(fma(p, k[3], g)), P)
    if P == tl.float32:
        fused = tl.where(fourth, fused, flush(g + p * k[3]))
    return tl.where(k[3] > 0.0, fused, g)


@triton.jit
def momentum(k, g, s):
    """The first step takes the gradient as it is, without looking at the state."""
    return tl.where(k[7] > 0.0, g, flush(fma(s, k[0], g)))


@triton.jit
def momentum8(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    g = decayed8(k, g, p)
    if PUBLISHED:  # LARS: what enters the momentum has its local learning rate in it
        m = momentum(k, flush(g * k[5]), s1)
        return rounded(flush(p - m), P), m, s2, s3
    else:
        m = momentum(k, g, s1)
        return rounded(flush(fma(m, negative(k[5]), p)), P), m, s2, s3


@triton.jit
def momentum32(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    if PUBLISHED:
        m = momentum(k, flush(g * k[5]), s1)
        return rounded(flush(p - m), P), m, s2, s3
    else:
        m = momentum(k, g, s1)
        return rounded(flush(fma(m * k[4], k[6], p)), P), m, s2, s3


@triton.jit
def momentum_direction(k, g, p, s1, s2, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    if PUBLISHED:
        return g
    else:
        return momentum(k, g, s1)


@triton.jit
def no_direction(k, g, p, s1, s2, P: tl.constexpr, PUBLISHED: tl.constexpr, BITS: tl.constexpr):
    return g


@triton.jit
def quotient(k, g, v):
    return g * rcp(tl.sqrt_rn(v) + k[2])


@triton.jit
def rmsprop8(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    h = decayed8(k, g, p)
    v = flush(fma(h * h, k[1], s1 * k[0]))
    # Upstream divides the gradient without its decay.
    return rounded(flush(fma(quotient(k, g, v), negative(k[4]), p)), P), v, s2, s3


@triton.jit
def rmsprop32(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    v = flush(fma(s1, k[0], (g * k[1]) * g))
    return rounded(flush(p - quotient(k, g, v) * k[4]), P), v, s2, s3


@triton.jit
def adagrad8(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    h = decayed8(k, g, p)
    v = flush(fma(h, h, s1))
    return rounded(flush(fma(quotient(k, g, v), negative(k[4]), p)), P), v, s2, s3


@triton.jit
def adagrad32(k, g, p, s1, s2, s3, P: tl.constexpr, PUBLISHED: tl.constexpr, SKIP: tl.constexpr):
    v = flush(fma(g, g, s1))
    return rounded(flush(fma(quotient(k, g, v), negative(k[4]), p)), P), v, s2, s3


# --- Memory and codes


@triton.jit
def pointers(address, T: tl.constexpr, begin, offsets, WHOLE: tl.constexpr, VECTOR: tl.constexpr):
    """Pointers to ``offsets`` elements behind element ``begin``; WHOLE: a multiple of VECTOR elements, as all are."""
    found = address.to(tl.pointer_type(T)) + begin + offsets
    if WHOLE:
        BYTES: tl.constexpr = VECTOR * T.primitive_bitwidth // 8
        found = tl.multiple_of(found, BYTES)
    return found


@triton.jit
def load(address, T: tl.constexpr, begin, offsets, inside, OTHER, WHOLE: tl.constexpr, VECTOR: tl.constexpr):
    at = pointers(address, T, begin, offsets, WHOLE, VECTOR)
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=OTHER)


@triton.jit
def store(address, T: tl.constexpr, begin, offsets, inside, value, WHOLE: tl.constexpr, VECTOR: tl.constexpr):
    at = pointers(address, T, begin, offsets, WHOLE, VECTOR)
    if WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def load_state(
    at, S: tl.constexpr, begin, offsets, inside, maps, SIGNED: tl.constexpr, BITS: tl.constexpr,
    WHOLE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """State S in float32. Lanes behind the tensor's end have upstream's codes: see `bnb_fsdp.rules.step8`."""
    if BITS == 32:
        return load(at[1 + S], tl.float32, begin, offsets, inside, 0.0, WHOLE, VECTOR)
    else:
        IS_SIGNED: tl.constexpr = (SIGNED >> S) & 1 == 1
        code = load(at[1 + S], tl.uint8, begin, offsets, inside, 128 if IS_SIGNED else 0, WHOLE, VECTOR)
        values = maps if IS_SIGNED else maps + _UNSIGNED_VALUES
        value = tl.load(values + code.to(tl.int32)).to(tl.float32, bitcast=True)
        return value * tl.load(at[4 + S].to(tl.pointer_type(tl.float32)) + begin // BLOCK)


@triton.jit
def encode(x, maps, SIGNED: tl.constexpr):
    """Codes (int32) of ``x``, which is not NaN, by the threshold rule: a bucket holds at most one threshold, and the
    low bits of ``x`` carry into the count when they pass it. A negative state never has a code of zero or above."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.maximum(bits & 0x7FFFFFFF, LOW), HIGH)
    bucket = (magnitude >> 16) - (LOW >> 16)
    if SIGNED:
        below = bits < 0
        away = (tl.load(maps + _SIGNED_BUCKETS + bucket + tl.where(below, BUCKETS, 0)) + magnitude) >> 16
        return tl.where(below, 126 - away, 127 + away)
    else:
        code = (tl.load(maps + _UNSIGNED_BUCKETS + bucket) + magnitude) >> 16
        return tl.where(bits < 0, 0, code)


@triton.jit
def store_state(
    at, S: tl.constexpr, begin, offsets, inside, maps, value, SIGNED: tl.constexpr, BITS: tl.constexpr,
    WHOLE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    if BITS == 32:
        store(at[1 + S], tl.float32, begin, offsets, inside, value, WHOLE, VECTOR)
    else:
        IS_SIGNED: tl.constexpr = (SIGNED >> S) & 1 == 1
        bits = value.to(tl.int32, bitcast=True)
        top = tl.max(bits & 0x7FFFFFFF, axis=0)  # NaN is above infinity, and so does not hide
        scale = top.to(tl.float32, bitcast=True)
        code = encode(value * flush(rcp(scale)), maps, IS_SIGNED)
        if (top == 0) | (top >= _INFINITY):  # a block of zeros, or a value that is not finite
            # NaN is left out of the maximum; its start value is bitsandbytes' own.
            scale = tl.max(tl.where(value == value, tl.abs(value), _MINUS_MAX), axis=0)
            scaled = value * flush(rcp(scale))
            if IS_SIGNED:  # upstream's search ends at code 0; then the sign is corrected
                below = (bits < 0) & (value == value)
                code_of_nan = tl.where(value > 0.0, 1, tl.where(below, 0, 255))
            else:
                code_of_nan = tl.zeros_like(bits)
            code = tl.where(scaled == scaled, encode(scaled, maps, IS_SIGNED), code_of_nan)
        store(at[1 + S], tl.uint8, begin, offsets, inside, code.to(tl.uint8), WHOLE, VECTOR)
        # Every lane has read the old scale by now: the new one depends on all of them.
        tl.store(at[4 + S].to(tl.pointer_type(tl.float32)) + begin // BLOCK, scale)


# --- A step. `at`: addresses of the parameter, three states and three scales.


@triton.jit
def step_chunk(
    gradient, at, numel, begin, k, maps,
    UPDATE: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr, COUPLED: tl.constexpr, BITS: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, SKIP: tl.constexpr, PUBLISHED: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One step of the WIDTH elements from ``begin`` on."""
    offsets = tl.arange(0, WIDTH)
    inside = begin + offsets < numel
    g = flush(widen(load(gradient, G, begin, offsets, inside, 0.0, WHOLE, VECTOR), G))
    p = widen(load(at[0], P, begin, offsets, inside, 0.0, WHOLE, VECTOR), P)
    s1 = load_state(at, 0, begin, offsets, inside, maps, SIGNED, BITS, WHOLE, VECTOR)
    s2, s3 = s1, s1
    if STATES > 1:
        s2 = load_state(at, 1, begin, offsets, inside, maps, SIGNED, BITS, WHOLE, VECTOR)
    if STATES > 2:
        s3 = load_state(at, 2, begin, offsets, inside, maps, SIGNED, BITS, WHOLE, VECTOR)
    if COUPLED and BITS == 32:
        g = decayed32(k, g, p, offsets % 4 == 0, P)
    new, n1, n2, n3 = UPDATE(k, g, p, s1, s2, s3, P, PUBLISHED, SKIP)
    if SKIP:
        zero = flush(g) == 0.0
        new, n1 = tl.where(zero, p, new), tl.where(zero, s1, n1)
        if STATES > 1:
            n2 = tl.where(zero, s2, n2)
    store(at[0], P, begin, offsets, inside, narrow(new, P), WHOLE, VECTOR)
    store_state(at, 0, begin, offsets, inside, maps, n1, SIGNED, BITS, WHOLE, VECTOR)
    if STATES > 1:
        store_state(at, 1, begin, offsets, inside, maps, n2, SIGNED, BITS, WHOLE, VECTOR)
    if STATES > 2:
        store_state(at, 2, begin, offsets, inside, maps, n3, SIGNED, BITS, WHOLE, VECTOR)


@triton.jit
def step_tile(
    gradient, at, numel, start, chunks, h, maps,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr, COUPLED: tl.constexpr,
    BITS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, SKIP: tl.constexpr, PUBLISHED: tl.constexpr,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One step of the ``chunks * WIDTH`` elements from ``start`` on."""
    k = SCALARS(h, P, PUBLISHED, BITS)
    aligned = ((gradient | at[0] | at[1] | at[2] | at[3]) & 15) == 0
    begin = start
    end = tl.minimum(start + chunks * WIDTH, numel)
    while begin < end:
        if aligned & (begin + WIDTH <= numel):
            step_chunk(
                gradient, at, numel, begin, k, maps, UPDATE, STATES, SIGNED, COUPLED, BITS, P, G, SKIP, PUBLISHED,
                WIDTH, True, VECTOR,
            )  # fmt: skip
        else:
            step_chunk(
                gradient, at, numel, begin, k, maps, UPDATE, STATES, SIGNED, COUPLED, BITS, P, G, SKIP, PUBLISHED,
                WIDTH, False, VECTOR,
            )  # fmt: skip
        begin += WIDTH


@triton.jit
def rate_or(lr, rate):
    """The learning rate in device memory at the address ``rate``, ``lr`` if that is 0."""
    if rate != 0:
        lr = tl.load(rate.to(tl.pointer_type(tl.float32)))
    return lr


@triton.jit(do_not_specialize=[
    "gradient", "parameter", "state1", "state2", "state3", "absmax1", "absmax2", "absmax3", "numel", "rate", "chunks",
])  # fmt: skip
def step_one(
    gradient: tl.int64, parameter: tl.int64, state1: tl.int64, state2: tl.int64, state3: tl.int64, absmax1: tl.int64,
    absmax2: tl.int64, absmax3: tl.int64, numel: tl.int64, rate: tl.int64, chunks, maps, beta1, beta2, beta3, alpha,
    eps, weight_decay, lr, scale, correction1, correction2, first,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, DIRECTION: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr,
    COUPLED: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, SKIP: tl.constexpr,
    PUBLISHED: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One step of one tensor, all of it in arguments."""
    h = (
        number(beta1), number(beta2), number(beta3), number(alpha), number(eps), number(weight_decay),
        rate_or(number(lr), rate.to(tl.int64)), number(scale), number(correction1), number(correction2), number(first),
    )  # fmt: skip
    at = (
        parameter.to(tl.int64), state1.to(tl.int64), state2.to(tl.int64), state3.to(tl.int64), absmax1.to(tl.int64),
        absmax2.to(tl.int64), absmax3.to(tl.int64),
    )  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * chunks * WIDTH
    step_tile(
        gradient.to(tl.int64), at, numel.to(tl.int64), start, chunks, h, maps,
        SCALARS, UPDATE, STATES, SIGNED, COUPLED, BITS, P, G, SKIP, PUBLISHED, WIDTH, VECTOR,
    )  # fmt: skip


@triton.jit
def hypers_of(slot, image, corrections, scales, slots, ON_DEVICE: tl.constexpr, SCALED: tl.constexpr):
    """The tensor's hyperparameters, from the image that the step has sent: see `triton_backend._Image`."""
    index = tl.load((image + slots).to(tl.pointer_type(tl.int32), bitcast=True) + slot)
    row = (image + slots + (slots + 1) // 2).to(tl.pointer_type(tl.float32), bitcast=True) + index * NUMBERS
    lr = rate_or(tl.load(row + 6), tl.load((row + _RATE).to(tl.pointer_type(tl.int64), bitcast=True)))
    if SCALED:
        scale = tl.load(scales + slot)
    else:
        scale = tl.load(row + 7)
    if ON_DEVICE:
        correction1 = tl.load(corrections + 3 * slot)
        correction2 = tl.load(corrections + 3 * slot + 1)
        first = tl.load(corrections + 3 * slot + 2)
    else:
        correction1, correction2, first = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10)
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), lr,
        scale, correction1, correction2, first,
    )  # fmt: skip


@triton.jit
def addresses_of(row):
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6),
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "chunks"])
def step_many(
    table, tiles, image, corrections, scales, maps, slots, chunks,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, DIRECTION: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr,
    COUPLED: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, SKIP: tl.constexpr,
    PUBLISHED: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, ON_DEVICE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """One step of every tensor of the table whose gradient's address is not 0."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    gradient = tl.load(image + slot)
    if gradient != 0:
        h = hypers_of(slot, image, corrections, scales, slots, ON_DEVICE, SCALED)
        row = table + slot * COLUMNS
        start = (tile - tl.load(row + _FIRST_TILE)) * chunks * WIDTH
        step_tile(
            gradient, addresses_of(row), tl.load(row + _NUMEL), start, chunks, h, maps,
            SCALARS, UPDATE, STATES, SIGNED, COUPLED, BITS, P, G, SKIP, PUBLISHED, WIDTH, VECTOR,
        )  # fmt: skip


@triton.jit
def correction(beta, step):
    """``1 - beta**step`` (float32), in float64 by repeated squaring; steps are below 2**24."""
    base = beta.to(tl.float64)
    power = tl.full(step.shape, 1.0, tl.float64)
    rest = step.to(tl.int32)
    for _ in range(24):
        power = tl.where((rest & 1) == 1, power * base, power)
        base = base * base
        rest = rest >> 1
    return (1.0 - power).to(tl.float32)


@triton.jit(do_not_specialize=["slots"])
def advance(table, image, corrections, slots, STORE: tl.constexpr, WIDTH: tl.constexpr):
    """The coming step's corrections of every tensor, whose step count is on the device; STORE: advance the counts."""
    slot = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = slot < slots
    active = inside & (tl.load(image + slot, mask=inside, other=0) != 0)
    count = tl.load(table + slot * COLUMNS + _STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(count, mask=active, other=0.0) + 1.0
    index = tl.load((image + slots).to(tl.pointer_type(tl.int32), bitcast=True) + slot, mask=inside, other=0)
    row = (image + slots + (slots + 1) // 2).to(tl.pointer_type(tl.float32), bitcast=True) + index * NUMBERS
    beta1 = tl.load(row, mask=inside, other=0.0)
    beta2 = tl.load(row + 1, mask=inside, other=0.0)
    tl.store(corrections + 3 * slot, correction(beta1, step), mask=inside)
    tl.store(corrections + 3 * slot + 1, correction(beta2, step), mask=inside)
    tl.store(corrections + 3 * slot + 2, tl.where(step == 1.0, 1.0, 0.0), mask=inside)
    if STORE:
        tl.store(count, step, mask=active)


# --- Sums of squares


@triton.jit(do_not_specialize=["slots", "chunks"])
def norms_of_tiles(
    table, tiles, image, corrections, partial, maps, slots, chunks,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, DIRECTION: tl.constexpr, STATES: tl.constexpr, SIGNED: tl.constexpr,
    COUPLED: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, SKIP: tl.constexpr,
    PUBLISHED: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """(tiles, 2): the sums of squares of each tile's direction and parameter; left alone where there is no gradient."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    gradient = tl.load(image + slot)
    if gradient != 0:
        k = SCALARS(hypers_of(slot, image, corrections, corrections, slots, ON_DEVICE, False), P, False, BITS)
        row = table + slot * COLUMNS
        at, numel = addresses_of(row), tl.load(row + _NUMEL)
        start = (tile - tl.load(row + _FIRST_TILE)) * chunks * WIDTH
        offsets = tl.arange(0, WIDTH)
        squares, parameters = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        begin = start
        end = tl.minimum(start + chunks * WIDTH, numel)
        while begin < end:
            inside = begin + offsets < numel
            g = flush(widen(load(gradient, G, begin, offsets, inside, 0.0, False, VECTOR), G))
            p = widen(load(at[0], P, begin, offsets, inside, 0.0, False, VECTOR), P)
            s1 = load_state(at, 0, begin, offsets, inside, maps, SIGNED, BITS, False, VECTOR)
            s2 = s1
            if STATES > 1:
                s2 = load_state(at, 1, begin, offsets, inside, maps, SIGNED, BITS, False, VECTOR)
            u = tl.where(inside, DIRECTION(k, g, p, s1, s2, P, PUBLISHED, BITS), 0.0)
            squares += u * u
            parameters += p * p
            begin += WIDTH
        tl.store(partial + 2 * tile, tl.sum(squares, axis=0))
        tl.store(partial + 2 * tile + 1, tl.sum(parameters, axis=0))


@triton.jit
def sum_tiles(table, image, partial, sums, WIDTH: tl.constexpr):
    """(slots, 2): the sums of each tensor's tiles, in a fixed order; a tensor without a gradient is left alone."""
    slot = tl.program_id(0)
    if tl.load(image + slot) != 0:
        first = tl.load(table + slot * COLUMNS + _FIRST_TILE)
        end = tl.load(table + (slot + 1) * COLUMNS + _FIRST_TILE)  # the table has a row more than tensors
        squares, parameters = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        while first < end:
            tile = first + tl.arange(0, WIDTH)
            squares += tl.load(partial + 2 * tile, mask=tile < end, other=0.0)
            parameters += tl.load(partial + 2 * tile + 1, mask=tile < end, other=0.0)
            first += WIDTH
        tl.store(sums + 2 * slot, tl.sum(squares, axis=0))
        tl.store(sums + 2 * slot + 1, tl.sum(parameters, axis=0))


# rule -> scalars, updates of 8 and 32 bits, direction, whether decay is added to the gradient
RULES = {
    "adam": (adam_scalars, adam8, adam32, adam_direction, False),
    "ademamix": (ademamix_scalars, ademamix8, ademamix32, no_direction, False),
    "lion": (lion_scalars, lion8, lion32, no_direction, False),
    "momentum": (coupled_scalars, momentum8, momentum32, momentum_direction, True),
    "rmsprop": (coupled_scalars, rmsprop8, rmsprop32, no_direction, True),
    "adagrad": (coupled_scalars, adagrad8, adagrad32, no_direction, True),
}
