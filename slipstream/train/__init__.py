"""Training drafts: on-policy data, EAGLE-3 and DSpark heads, calibration, export in the released formats."""
