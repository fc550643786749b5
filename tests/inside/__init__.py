"""What tests look at inside the library: a private attribute that tests of several modules need is named here only."""
