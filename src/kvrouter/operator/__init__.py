"""Kubernetes: one deployment across zones, admitted, planned, labelled, and told about."""
