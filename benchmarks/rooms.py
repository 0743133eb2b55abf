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
PROOFS = (*ATTACKS, "certificates")
CONSTANTS = ("device.py", "rounding.py", "certificates")
SMOOTHING = (*PROOFS, "smoothing")
PROPERTIES = (*PROOFS, "omega")
# A test compares these with what a verdict imports.
VNNLIB = (
    *BASE,
    *(f"certificates/{name}" for name in ("clock.py", "device.py", "graph", "relax", "search")),
    "vnnlib",
    *(f"zoo/{name}.py" for name in ("onnx", "onnx_file", "onnx_operators")),
)
SHIFTS = (*ATTACKS, "evaluation/shifts.py")
EVALUATION = (*PROOFS, "evaluation")
TRAINING = (*PROOFS, "hardening")
