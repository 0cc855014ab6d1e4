"""Pure scoring rules of published benchmarks: detections in, verdicts out, no model."""
