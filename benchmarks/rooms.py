"""Which rooms of src/wassail a stage depends on: a change of another room leaves its figures as
they are.
"""

BASE = (
    "device.py",
    "geometry.py",
    "losses.py",
    "network.py",
    "plane_steps.py",
    "rounding.py",
    "specification.py",
    "threat.py",
    "ties.py",
)
CURVES = ("transport",)
ATTACKS = (*BASE, *CURVES, "attacks")
BOUNDS = tuple(
    f"certificates/{name}"
    for name in (
        "bound.py",
        "clock.py",
        "device.py",
        "exact",
        "graph",
        "lipschitz",
        "relax",
        "search",
    )
)
CONSTANTS = (*BASE, *BOUNDS)
PROOFS = (*ATTACKS, *BOUNDS, "certificates/prove")
LOSSES = (*PROOFS, "certificates/loss")
SMOOTHING = (*ATTACKS, "smoothing")
PROPERTIES = (*LOSSES, "omega")
# A test compares CONSTANTS, PROOFS, SMOOTHING and VNNLIB with what a call imports.
VNNLIB = (
    *BASE,
    *(f"certificates/{name}" for name in ("clock.py", "device.py", "graph", "relax", "search")),
    "vnnlib",
    *(f"zoo/{name}.py" for name in ("onnx", "onnx_file", "onnx_operators", "runtime", "source")),
)
SHIFTS = (*ATTACKS, "evaluation/shifts.py")
EVALUATION = (*LOSSES, "evaluation")
TRAINING = (*PROOFS, "hardening")
