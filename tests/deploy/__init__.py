"""Tests of deploy/ and of the package that is deployed."""
