"""The pipeline around the library: DVC stages, Prefect flows, MLflow tracking, the report."""
